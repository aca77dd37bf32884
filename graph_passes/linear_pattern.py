"""Matches y = x W^T + b with constant W and b: MatMul or Gemm, then an Add."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.subgraph import Bias, Linear, Weight

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
STANDARD_DOMAINS = ("", "ai.onnx")


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """`node` is one of these standard operators."""
    return node is not None and node.op_type in op_types and node.domain in STANDARD_DOMAINS


def attribute(node: ir.Node, name: str, default: object) -> object:
    """Value of an attribute, or its default."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def match_linear(node: ir.Node) -> Linear | None:
    """The linear that `node` multiplies for, or None where an operand is not what a linear has."""
    if is_op(node, "MatMul"):
        trans_b, alpha, beta, c = False, 1.0, 1.0, None
    elif is_op(node, "Gemm") and not attribute(node, "transA", 0):
        trans_b = bool(attribute(node, "transB", 0))
        alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))  # type: ignore[arg-type]
        c = node.inputs[2] if len(node.inputs) > 2 else None
    else:
        return None
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or constant_source(x)[0] is not None:
        return None
    weight, weight_nodes = _match_weight(w, trans_b, alpha)
    if weight is None:
        return None
    y = node.outputs[0]
    if c is not None:
        bias = _match_bias(c, weight.shape[0], beta, rank=2)
        if bias is None:
            return None
        return Linear(x, y, weight, bias, node, (node,), weight_nodes)
    add, bias = _match_add(y, weight.shape[0])
    if add is None:
        return Linear(x, y, weight, None, node, (node,), weight_nodes)
    return Linear(x, add.outputs[0], weight, bias, node, (node, add), weight_nodes)


def constant_source(value: ir.Value) -> tuple[ir.Value | None, bool, tuple[ir.Node, ...]]:
    """Follows Casts, Identities and matrix Transposes back to a constant: (constant, transposed, nodes on the way)."""
    transposed, nodes = False, []
    while get_const_tensor(value) is None:
        node = value.producer()
        if is_op(node, "Transpose"):
            if list(attribute(node, "perm", [1, 0])) != [1, 0]:  # type: ignore[arg-type, call-overload]
                return None, False, ()
            transposed = not transposed
        elif not is_op(node, "Cast", "Identity"):
            return None, False, ()
        nodes.append(node)
        value = node.inputs[0]
    return value, transposed, tuple(nodes)


def _match_weight(value: ir.Value, trans_b: bool, alpha: float) -> tuple[Weight | None, tuple[ir.Node, ...]]:
    stored, transposed, nodes = constant_source(value)
    if stored is None:
        return None, ()
    tensor = get_const_tensor(stored)
    shape = tuple(tensor.shape.numpy())
    casts = [node for node in nodes if node.op_type == "Cast"]
    dtype = ir.DataType(casts[0].attributes["to"].as_int()) if casts else tensor.dtype
    if len(shape) != 2 or tensor.dtype not in FLOATS or dtype not in FLOATS:
        return None, ()
    stored_transposed = transposed == trans_b  # MatMul multiplies by [in, out]
    if stored_transposed:
        shape = (shape[1], shape[0])
    return Weight(stored, stored_transposed, dtype, alpha, shape), nodes


def _match_bias(value: ir.Value, features: int, scale: float, rank: int | None) -> Bias | None:
    """A constant that adds the same vector to every row, without adding dimensions to a tensor of `rank`."""
    stored, _, _ = constant_source(value)
    if stored is None:
        return None
    tensor = get_const_tensor(stored)
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype not in FLOATS or tensor.size not in (1, features) or (shape and shape[-1] != tensor.size):
        return None
    if len(shape) > (1 if rank is None else rank):
        return None
    return Bias(stored, scale)


def _match_add(y: ir.Value, features: int) -> tuple[ir.Node | None, Bias | None]:
    uses = y.uses()
    if len(uses) != 1 or y.is_graph_output():
        return None, None
    node, index = next(iter(uses))
    if not is_op(node, "Add") or len(node.inputs) != 2:
        return None, None
    bias = _match_bias(node.inputs[1 - index], features, 1.0, None if y.shape is None else len(y.shape))
    return (node, bias) if bias is not None else (None, None)
