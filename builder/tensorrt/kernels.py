"""Which kernels of the plugin library the nodes of a rewritten model need."""

import onnx

from trt_nvfp4.plugins.compile.kernel_groups import OpUse, groups_of
from trt_nvfp4.plugins.ops import DOMAIN, OPS, STANDARD_OPS

_TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}


def kernels_of(model: onnx.ModelProto) -> frozenset[str]:
    """Names of the groups of kernels that the plugin nodes need, with the fallbacks that a shape could need."""
    graph = model.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types.setdefault(value.name, value.type.tensor_type.elem_type)
    return groups_of(_use(node, types) for node in graph.node if node.domain == DOMAIN or is_standard_op(node))


def is_standard_op(node: onnx.NodeProto) -> bool:
    """True for an operator of ONNX's own that TensorRT's parser makes a plugin of."""
    return node.domain in ("", "ai.onnx") and node.op_type in STANDARD_OPS


def _use(node: onnx.NodeProto, types: dict[str, int]) -> OpUse:
    if is_standard_op(node):
        return OpUse(node.op_type, {}, next((_TYPES.get(types.get(name, 0)) for name in node.input), None))
    op = OPS[node.op_type]
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    # Activations often have no type in a graph, and constants of the same type do.
    names = [name for name, formal in zip(node.input, op.inputs, strict=True) if formal.type == "T"]
    names += [name for name, formal in zip(node.output, op.outputs, strict=True) if formal.type == "T"]
    known = (_TYPES[types[name]] for name in names if types.get(name) in _TYPES)
    return OpUse(node.op_type, op.complete_attributes(**given), next(known, None))
