"""Matches y = x W^T + b with constant W and b: MatMul or Gemm, then an Add."""

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import (
    FLOATS,
    constant_source,
    is_op,
    operand,
    optional_operand,
    rank,
)
from trt_nvfp4.graph_passes.patterns.give_ups import described, gave_up
from trt_nvfp4.graph_passes.subgraphs.parts import Bias, Linear, Weight


def match_linear(node: ir.Node) -> Linear | None:
    """The linear that `node` multiplies for, or None where an operand is not what a linear has."""
    trans_b, alpha, beta, c = False, 1.0, 1.0, None
    if is_op(node, "Gemm"):
        if node.attributes.get_int("transA", 0):
            gave_up("linear", node, "its first operand is transposed (transA)")
            return None
        trans_b = bool(node.attributes.get_int("transB", 0))
        alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
        c = optional_operand(node, 2)
    elif not is_op(node, "MatMul"):
        return None
    x = operand(node, 0)
    if constant_source(x) is not None:
        gave_up("linear", node, f"its first operand is constant: {described(x)}")
        return None
    weight, weight_nodes = _match_weight(operand(node, 1), trans_b, alpha)
    if weight is None:
        gave_up("linear", node, _unsupported_weight(operand(node, 1)))
        return None
    y = node.outputs[0]
    if c is not None:
        bias = _match_bias(c, weight.shape[0], beta, dimensions=2)
        if bias is None:
            gave_up(
                "linear", node, f"the value that it adds is not a constant with one number per channel: {described(c)}"
            )
            return None
        return Linear(x, y, weight, bias, node, (node,), weight_nodes)
    added = _match_add(y, weight.shape[0])
    if added is None:
        return Linear(x, y, weight, None, node, (node,), weight_nodes)
    add, bias = added
    return Linear(x, add.outputs[0], weight, bias, node, (node, add), weight_nodes)


def _match_weight(value: ir.Value, trans_b: bool, alpha: float) -> tuple[Weight | None, tuple[ir.Node, ...]]:
    source = constant_source(value)
    if source is None:
        return None, ()
    stored, transposed, nodes = source
    tensor = get_const_tensor(stored)
    assert tensor is not None
    casts = [node for node in nodes if node.op_type == "Cast"]
    dtype = ir.DataType(casts[0].attributes["to"].as_int()) if casts else tensor.dtype
    if len(tensor.shape) != 2 or tensor.dtype not in FLOATS or dtype not in FLOATS:
        return None, ()
    rows, columns = tensor.shape.numpy()
    stored_transposed = transposed == trans_b  # MatMul multiplies by [in, out]
    return Weight(
        stored, stored_transposed, dtype, alpha, (columns, rows) if stored_transposed else (rows, columns)
    ), nodes


def _unsupported_weight(value: ir.Value) -> str:
    source = constant_source(value)
    if source is None:
        return f"its second operand is computed, not a constant: {described(value)}"
    tensor = get_const_tensor(source[0])
    assert tensor is not None
    shape = list(tensor.shape.numpy())
    return (
        f"its second operand '{source[0].name}' is of type {tensor.dtype.name.lower()} and shape {shape}; a linear's "
        "is a matrix in float32, float16 or bfloat16"
    )


def _match_bias(value: ir.Value, features: int, scale: float, dimensions: int | None) -> Bias | None:
    """A constant that adds the same vector to every row, without adding dimensions to a tensor of `dimensions`."""
    source = constant_source(value)
    if source is None:
        return None
    stored, transposed, _ = source
    tensor = get_const_tensor(stored)
    assert tensor is not None
    shape = tensor.shape.numpy()[:: -1 if transposed else 1]
    if tensor.dtype not in FLOATS or tensor.size not in (1, features) or (shape and shape[-1] != tensor.size):
        return None
    return None if len(shape) > (1 if dimensions is None else dimensions) else Bias(stored, scale)


def _match_add(y: ir.Value, features: int) -> tuple[ir.Node, Bias] | None:
    uses = y.uses()
    if len(uses) != 1 or y.is_graph_output():
        return None
    node, index = next(iter(uses))
    if not is_op(node, "Add"):
        return None
    bias = _match_bias(operand(node, 1 - index), features, 1.0, rank(y))
    return None if bias is None else (node, bias)
