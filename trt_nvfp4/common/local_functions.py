"""A model's local functions, inlined alike wherever tensors inside them are named."""

import onnx
import onnx.inliner

from trt_nvfp4.common.collectives import is_collective
from trt_nvfp4.common.nested_graphs import within
from trt_nvfp4.plugins.ops import DOMAIN, OPS, VERSION

# Below opset 13 these work on all axes from theirs on, which their conversion needs the rank for.
_NEED_RANK = ("Softmax", "LogSoftmax", "Hardmax")
_ONE_AXIS_SINCE = 13


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with every call of a local function replaced by its nodes, converted to the model's opset. Collectives
    stay: their bodies stand for what other ranks do.

    Raises:
        ValueError: a function of another opset whose nodes cannot be converted, as the message says.
    """
    kept = [function for function in model.functions if is_collective(function)]
    if len(kept) == len(model.functions):
        return model
    opset = _opset(model)
    _share_opset(model, opset)
    for function in model.functions:
        for node in function.node if _opset(function) < _ONE_AXIS_SINCE <= opset else ():
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            if node.op_type in _NEED_RANK and not node.domain and axis != -1:
                raise ValueError(
                    f"function '{function.name}' has a {node.op_type} of opset {_opset(function)}, and the model is of "
                    f"opset {opset}, where it means something else; export both in one opset"
                )
    try:
        if not kept:
            return onnx.inliner.inline_local_functions(model, convert_version=True)
        return onnx.inliner.inline_selected_functions(model, [(each.domain, each.name) for each in kept], exclude=True)
    except RuntimeError as error:  # of the converter
        raise ValueError(f"its local functions cannot be converted to opset {opset}: {error}") from error


def add_op_functions(model: onnx.ModelProto) -> None:
    """Gives `model` the functions of the plugins that its main graph and functions call, where it lacks them."""
    present = {function.name for function in model.functions if function.domain == DOMAIN}
    nodes = [node for part in (model.graph, *model.functions) for node in part.node if node.domain == DOMAIN]
    missing = {node.op_type for node in nodes} - present
    model.functions.extend(OPS[name].function(_opset(model)) for name in sorted(missing) if name in OPS)
    if nodes and not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))


def _share_opset(model: onnx.ModelProto, opset: int) -> None:
    """Gives functions the model's opset where their operators are the same in both: newer ones cannot be converted."""
    for function in model.functions:
        nodes = [*function.node, *(node for outer in function.node for body in within(outer) for node in body.node)]
        for named in function.opset_import:
            is_default = named.domain in ("", "ai.onnx")
            if is_default and all(_since(node, named.version) == _since(node, opset) for node in nodes):
                named.version = opset


def _since(node: onnx.NodeProto, opset: int) -> int | None:
    """The opset that an operator has been the same since."""
    known = not node.domain and onnx.defs.has(node.op_type, max_inclusive_version=opset)
    return onnx.defs.get_schema(node.op_type, opset).since_version if known else None


def _opset(part: onnx.ModelProto | onnx.FunctionProto) -> int:
    return max((int(opset.version) for opset in part.opset_import if opset.domain in ("", "ai.onnx")), default=1)
