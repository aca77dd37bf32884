"""Matches RMSNorm: the operator of opset 23, or what exporters decompose it into (Casts to float32 included)."""

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import (
    constant_integers,
    constant_source,
    ints_attribute,
    is_float_cast,
    is_op,
    operand,
    optional_operand,
    rank,
)
from trt_nvfp4.graph_passes.subgraphs.parts import RMSNorm


def match_rms_norm(y: ir.Value, features: int) -> RMSNorm | None:
    """The RMSNorm over the last axis (of size `features`) that produces `y`."""
    node = y.producer()
    if is_op(node, "RMSNormalization"):
        return _match_operator(node, features)
    nodes: list[ir.Node] = []
    value = _strip_casts(y, nodes)
    node = value.producer()
    weight, offset = None, 0.0
    if is_op(node, "Mul"):
        for index in (0, 1):
            scale = _match_scale(operand(node, index), features)
            if scale is not None:
                weight, offset, scale_nodes = scale
                nodes += [node, *scale_nodes]
                value = _strip_casts(operand(node, 1 - index), nodes)
                break
    normalized = _match_normalize(value, nodes)
    if normalized is None:
        return None
    x, epsilon = normalized
    if weight is not None and not _scales(weight, x, features):
        return None
    return RMSNorm(x, weight, offset, epsilon, tuple(dict.fromkeys(nodes)))


def _is_last(axes: list[int] | None, x: ir.Value) -> bool:
    dimensions = rank(x)
    return axes == [-1] or (dimensions is not None and axes == [dimensions - 1])


def _scales(weight: ir.Value, x: ir.Value, features: int) -> bool:
    """The constant `weight` has a number for each feature of x, and gives x no more dimensions or features."""
    tensor = get_const_tensor(weight)
    assert tensor is not None
    if tensor.size != features or tensor.shape.numpy()[-1:] != (features,) or len(tensor.shape) > (rank(x) or 1):
        return False
    if x.shape is None:
        return True
    return rank(x) != 0 and (not isinstance(x.shape[-1], int) or x.shape[-1] == features)


def _match_operator(node: ir.Node, features: int) -> RMSNorm | None:
    x, source = operand(node, 0), constant_source(operand(node, 1))
    if source is None or not _is_last([node.attributes.get_int("axis", -1)], x):
        return None
    if not _scales(source[0], x, features):
        return None
    return RMSNorm(x, source[0], 0.0, node.attributes.get_float("epsilon", 1e-5), (node,))


def _strip_casts(value: ir.Value, nodes: list[ir.Node]) -> ir.Value:
    while is_float_cast(node := value.producer()) or is_op(node, "Identity"):
        nodes.append(node)
        value = operand(node, 0)
    return value


def _match_scale(value: ir.Value, features: int) -> tuple[ir.Value, float, list[ir.Node]] | None:
    """A constant vector w, or w + number (Gemma's 1 + w)."""
    nodes: list[ir.Node] = []
    value = _strip_casts(value, nodes)
    offset = 0.0
    node = value.producer()
    if is_op(node, "Add"):
        for index in (0, 1):
            number = _number(operand(node, index))
            if number is not None:
                nodes.append(node)
                offset, value = number, _strip_casts(operand(node, 1 - index), nodes)
                break
    tensor = get_const_tensor(value)
    if tensor is None or tensor.size != features:
        return None
    return value, offset, nodes


def _number(value: ir.Value | None) -> float | None:
    """A constant that is one number; of more dimensions, it might add them."""
    source = None if value is None else constant_source(value)
    tensor = None if source is None else get_const_tensor(source[0])
    if tensor is None or tensor.size != 1 or len(tensor.shape) > 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def _match_normalize(value: ir.Value, nodes: list[ir.Node]) -> tuple[ir.Value, float] | None:
    """x / sqrt(mean(x^2) + epsilon), as a Div, or as a Mul by a Reciprocal, a Div(1, .) or a Pow(., -0.5)."""
    node = value.producer()
    if is_op(node, "Div"):
        orders = [(operand(node, 0), operand(node, 1), _match_root)]
    elif is_op(node, "Mul"):
        orders = [(operand(node, i), operand(node, 1 - i), _match_inverse_root) for i in (0, 1)]
    else:
        return None
    for x, factor, match in orders:
        own = [node]  # those of the other order may be what computes x
        radicand = match(factor, own)
        epsilon = None if radicand is None else _match_mean_square(radicand, x, own)
        if epsilon is not None:
            nodes += own
            return _strip_casts(x, nodes), epsilon
    return None


def _match_inverse_root(value: ir.Value, nodes: list[ir.Node]) -> ir.Value | None:
    node = value.producer()
    if is_op(node, "Pow") and _number(operand(node, 1)) == -0.5:
        nodes.append(node)
        return operand(node, 0)
    if is_op(node, "Reciprocal"):
        root = operand(node, 0)
    elif is_op(node, "Div") and _number(operand(node, 0)) == 1.0:
        root = operand(node, 1)
    else:
        return None
    nodes.append(node)
    return _match_root(root, nodes)


def _match_root(value: ir.Value, nodes: list[ir.Node]) -> ir.Value | None:
    node = value.producer()
    if is_op(node, "Sqrt") or (is_op(node, "Pow") and _number(operand(node, 1)) == 0.5):
        nodes.append(node)
        return operand(node, 0)
    return None


def _match_mean_square(value: ir.Value, x: ir.Value, nodes: list[ir.Node]) -> float | None:
    """Epsilon of mean(x^2) + epsilon over the last axis."""
    add = value.producer()
    if not is_op(add, "Add"):
        return None
    for index in (0, 1):
        epsilon, mean = _number(operand(add, index)), operand(add, 1 - index).producer()
        if epsilon is None or not is_op(mean, "ReduceMean") or not mean.attributes.get_int("keepdims", 1):
            continue
        axes = ints_attribute(mean, "axes") or constant_integers(optional_operand(mean, 1))
        square = operand(mean, 0).producer()
        if not is_op(square, "Pow", "Mul") or operand(square, 0) is not x or not _is_last(axes, x):
            continue
        if (_number(operand(square, 1)) == 2.0) if square.op_type == "Pow" else (operand(square, 1) is x):
            nodes += [add, mean, square]
            return epsilon
    return None
