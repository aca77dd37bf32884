"""Einsums of a tensor with a constant matrix become MatMuls, as the patterns know them; names and values stay."""

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import FLOATS, constant_source, is_op, operand


def multiply_matrices(graph: ir.Graph) -> None:
    """Replaces every Einsum that sums over the last axis of one operand and an axis of the other, a constant matrix."""
    for node in list(graph):
        if not is_op(node, "Einsum") or len(node.inputs) != 2:
            continue
        terms, _, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
        first, _, second = terms.partition(",")
        for index, (x, weight) in enumerate(((second, first), (first, second))):
            order = _order(x, weight, result)
            if order is None or not _is_matrix(operand(node, index)):
                continue
            # Einsum repeats an operand of 1 along K, which MatMul refuses.
            if _size(operand(node, 1 - index), -1) == _size(operand(node, index), weight.index(x[-1])):
                _replace(graph, node, operand(node, 1 - index), operand(node, index), order == "out, in")
                break


def _is_matrix(value: ir.Value) -> bool:
    source = constant_source(value)
    tensor = None if source is None else get_const_tensor(source[0])
    return tensor is not None and tensor.dtype in FLOATS and len(tensor.shape) == 2


def _size(value: ir.Value, axis: int) -> int | None:
    """The size of a dimension, where it is known."""
    dim = None if value.shape is None else value.shape[axis]
    return dim if isinstance(dim, int) else None


def _order(x: str, weight: str, result: str) -> str | None:
    """The order of the axes of `weight` if x, weight -> result is the product of a linear, or None if it is not."""
    rows, k = x[:-1], x[-1:]
    letters = rows.replace("...", "")
    if not rows or len(weight) != 2 or k not in weight or len(set(letters + weight)) != len(letters) + 2:
        return None
    out = weight.replace(k, "")
    if result != rows + out:
        return None
    return "in, out" if weight == k + out else "out, in"


def _replace(graph: ir.Graph, einsum: ir.Node, x: ir.Value, matrix: ir.Value, transposed: bool) -> None:
    nodes = []
    if transposed:
        nodes.append(ir.node("Transpose", [matrix], {"perm": [1, 0]}))
        matrix = nodes[0].outputs[0]
    product = ir.node("MatMul", [x, matrix], name=einsum.name)
    ir.convenience.replace_nodes_and_values(graph, einsum, [einsum], [*nodes, product], einsum.outputs, product.outputs)
