"""Chooses what a network computes in: 16 bits for a float32 model, with what stays float32."""

import re
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.ir.tensors import read_tensor
from trt_nvfp4.graph_passes.load.activation_types import ACTIVATIONS, Activations
from trt_nvfp4.graph_passes.load.by_hand import is_plugin
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.mixed_precision.float32_nodes import MOVES, float32_nodes, is_float32

# Values that calibration data take beyond half of float16's range stay float32: other inputs go further.
FLOAT16_LIMIT = float(np.finfo(np.float16).max) / 2
_SMALLEST_FLOAT16 = float(np.finfo(np.float16).smallest_subnormal)
_PRODUCTS = ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")
# What a mask of attention passes through on its way to the Softmax.
_MASKED = frozenset({"Add", "Cast", "Mul", "Sub", "Where", *MOVES})
_CHUNK = 1 << 23
_MOST_FLOAT32 = 0.05  # of the weights of products, without a warning


def choose(
    model: SourceModel, wanted: str, keep: str | None = None, ranges: Mapping[str, float] | None = None
) -> Activations:
    """The type that `model` will compute in, and the nodes that stay float32.

    Args:
        wanted: a member of `ACTIVATIONS`; "auto" is BF16, whose range is that of float32, for a float32 model. Models
            that have tensors of 16 bits already stay as they are.
        keep: regular expression of the names of nodes that stay float32.
        ranges: largest magnitudes of tensors by name, from calibration data; FP16 needs them to know what overflows.

    Raises:
        ValueError: `wanted` is unknown; "bf16" or "fp16" is wanted of a model that cannot be converted; `keep` is not
            a regular expression, or matches no node.
    """
    if wanted not in ACTIVATIONS:
        raise ValueError(f"unknown activations '{wanted}'; one of {', '.join(ACTIVATIONS)}")
    if wanted == "keep":
        return Activations()
    if (why := unsupported(model) or _unsupported_cache(model, wanted)) is not None:
        if wanted != "auto":
            raise ValueError(f"{model.path}: --activations {wanted} is for float32 models: {why}; leave it out")
        return Activations(note=why if _multiplies_float32(model.graph) else "")
    kind = "fp16" if wanted == "fp16" else "bf16"
    dtype = Activations(kind).dtype
    assert dtype is not None
    try:
        matched = keep is None or any(re.search(keep, node.name or "") for node in model.graph)
    except re.error as error:
        raise ValueError(f"--set keep-fp32={keep}: not a regular expression: {error}") from error
    if not matched:
        raise ValueError(
            f"--set keep-fp32={keep}: matches no node of {model.path}; nodes are called such as '{model.graph[0].name}'"
        )
    stays = float32_nodes(model.ir_model, dtype, keep)
    if kind == "fp16":
        _add_overflows(model.graph, stays, ranges or {})
    return Activations(kind, stays)


def unsupported(model: SourceModel) -> str | None:
    """Why `model` cannot be converted to 16 bits; None where it can."""
    if not _multiplies_float32(model.graph):
        return "it multiplies nothing in float32"
    for value in _values(model.graph):
        if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            return f"tensor '{value.name}' has {value.dtype.name.lower()} already"
    for node in model.graph:
        if is_op(node, "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
            return f"node '{node.name}' ({node.op_type}) quantizes already"
        for value in node.outputs:
            if value.dtype is None and value.name:
                return f"the type of tensor '{value.name}' (node '{node.name}', {node.op_type}) is not known"
    return None


def _unsupported_cache(model: SourceModel, wanted: str) -> str | None:
    """Why caches of `model` cannot have the type `wanted`; None where they can.

    Callers of a model with float32 caches would feed float32 to FP16 ones; BF16 inputs take float32 samples everywhere.
    """
    scatters = (node for node in model.graph if is_op(node, "TensorScatter") and is_float32(node.outputs[0]))
    if wanted == "fp16" and (node := next(scatters, None)) is not None:
        return f"node '{node.name}' updates a float32 cache in place; choose bf16, or export the decoder in float16"
    return None


def slow_products(model: SourceModel, activations: Activations) -> str | None:
    """Which products stay float32, and why, where they have more than 5 % of the weights; else None."""
    if activations.dtype is None:
        return None
    sizes: dict[str, int] = {}
    for node in model.graph:
        if is_op(node, *_PRODUCTS) and is_float32(node.outputs[0]):
            tensors = [get_const_tensor(value) for value in node.inputs if value is not None]
            sizes[node.name or ""] = max((tensor.size for tensor in tensors if tensor is not None), default=0)
    slow = [name for name in sizes if name in activations.float32_nodes]
    share = sum(sizes[name] for name in slow) / max(1, sum(sizes.values()))
    if share <= _MOST_FLOAT32:
        return None
    largest = max(slow, key=lambda name: sizes[name])
    return (
        f"{len(slow)} products with {share:.0%} of the weights stay float32, such as node '{largest}': "
        f"{activations.float32_nodes[largest]}"
    )


def observed_tensors(model: SourceModel) -> list[str]:
    """The float32 tensors whose ranges `choose` can use: not masks, which become as large as the type allows, nor what
    stays among nodes that compute in float32 anyway, where T5 takes the logarithm of 0."""
    stays = {name for names in float32_nodes(model.ir_model, ir.DataType.FLOAT16).values() for name in names}
    masks = _masks(model.graph)
    values = (value for node in model.graph if not is_op(node, "Constant") for value in node.outputs)
    return [value.name or "" for value in values if is_float32(value) and value not in masks and _leaves(value, stays)]


def _leaves(value: ir.Value, stays: Collection[str]) -> bool:
    """Whether a value is made or read by a node that does not stay float32, or is an output."""
    return value.is_graph_output() or any(
        node is not None and node.name not in stays for node in (value.producer(), *value.consumers())
    )


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _multiplies_float32(graph: ir.Graph) -> bool:
    products = (node for node in graph if is_op(node, *_PRODUCTS) or is_plugin(node))
    return any(is_float32(node.outputs[0]) for node in products)


def _add_overflows(graph: ir.Graph, stays: dict[str, list[str]], ranges: Mapping[str, float]) -> None:
    """Adds the nodes that make or read a value outside of float16's range."""
    known = {name for nodes in stays.values() for name in nodes}
    masks = _masks(graph)

    def add(reason: str, *nodes: ir.Node | None) -> None:
        for node in nodes:
            if node is not None and node.graph is graph and node.name not in known:
                known.add(node.name or "")
                stays.setdefault(reason, []).append(node.name or "")

    for value in _values(graph):
        if not is_float32(value) or value in masks:
            continue
        if (tensor := get_const_tensor(value)) is not None:
            if (problem := _outside(tensor)) is not None:
                add(f"constant {problem}", *value.consumers())
        elif (largest := ranges.get(value.name or "", 0.0)) > FLOAT16_LIMIT:
            reason = f"the calibration data take '{value.name}' to {largest:.3g}, too near to float16's end at 65504"
            add(reason, value.producer(), *value.consumers())


def _outside(tensor: ir.TensorProtocol) -> str | None:
    """The numbers of a constant that float16 cannot hold: values beyond its range, or a number that becomes 0."""
    flat = read_tensor(tensor).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        values = np.abs(flat[start : start + _CHUNK])
        finite = values[np.isfinite(values)]
        if finite.size and float(finite.max()) > 2 * FLOAT16_LIMIT:
            return f"{float(finite.max()):.3g} is beyond float16's range"
    if flat.size == 1 and 0 < abs(float(flat[0])) < _SMALLEST_FLOAT16:
        return f"{float(flat[0]):.3g} is 0 in float16"
    return None


def _masks(graph: ir.Graph) -> set[ir.Value]:
    """The constants that hide scores from a Softmax by being far below them, and all values on their way there."""
    masks: set[ir.Value] = set()
    for value in _values(graph):
        tensor = get_const_tensor(value) if is_float32(value) else None
        if tensor is None or tensor.size != 1 or float(np.asarray(tensor.numpy()).reshape(-1)[0]) > -FLOAT16_LIMIT:
            continue
        path = _way_to_softmax(value)
        if path is not None:
            masks |= path
    return masks


def _way_to_softmax(value: ir.Value) -> set[ir.Value] | None:
    """The values between a constant and the Softmax nodes that it reaches; None where it reaches something else."""
    path, pending = {value}, [value]
    while pending:
        for user in pending.pop().consumers():
            if is_op(user, "Softmax"):
                continue
            if not is_op(user, *_MASKED):
                return None
            new = [output for output in user.outputs if output not in path]
            path.update(new)
            pending += new
    return path
