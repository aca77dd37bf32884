"""Matches RMSNorm: the operator of opset 23, or what exporters decompose it into (Casts to float32 included)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.linear_pattern import attribute, constant_source, is_op
from trt_nvfp4.graph_passes.subgraph import RMSNorm


def match_rms_norm(y: ir.Value, features: int) -> RMSNorm | None:
    """The RMSNorm over the last axis (of size `features`) that produces `y`."""
    node = y.producer()
    if is_op(node, "RMSNormalization") or (
        node is not None and node.op_type == "SimplifiedLayerNormalization" and node.domain in ("", "com.microsoft")
    ):
        return _match_operator(node, y)
    nodes: list[ir.Node] = []
    value = _strip_casts(y, nodes)
    node = value.producer()
    weight: ir.Value | None = None
    offset = 0.0
    scaled = None
    if is_op(node, "Mul"):
        for index in (0, 1):
            found = _match_scale(node.inputs[index], features)
            if found is not None:
                weight, offset, scale_nodes = found
                nodes += [node, *scale_nodes]
                scaled = _strip_casts(node.inputs[1 - index], nodes)
                break
    normalized = _match_normalize(scaled if scaled is not None else value, nodes, features)
    if normalized is None:
        return None
    x, epsilon = normalized
    return RMSNorm(x, y, weight, offset, epsilon, tuple(dict.fromkeys(nodes)))


def _match_operator(node: ir.Node, y: ir.Value) -> RMSNorm | None:
    rank = None if node.inputs[0].shape is None else len(node.inputs[0].shape)
    if attribute(node, "axis", -1) not in (-1, None if rank is None else rank - 1):
        return None
    weight, _, _ = constant_source(node.inputs[1])
    if weight is None:
        return None
    return RMSNorm(node.inputs[0], y, weight, 0.0, float(attribute(node, "epsilon", 1e-5)), (node,))  # type: ignore[arg-type]


def _strip_casts(value: ir.Value, nodes: list[ir.Node]) -> ir.Value:
    while is_op(node := value.producer(), "Cast", "Identity"):
        nodes.append(node)
        value = node.inputs[0]
    return value


def _match_scale(value: ir.Value, features: int) -> tuple[ir.Value, float, list[ir.Node]] | None:
    """A constant vector w, or w + number (Gemma's 1 + w)."""
    nodes: list[ir.Node] = []
    value = _strip_casts(value, nodes)
    offset = 0.0
    node = value.producer()
    if is_op(node, "Add") and get_const_tensor(value) is None:
        for index in (0, 1):
            number = _number(node.inputs[index])
            if number is not None:
                offset, value = number, _strip_casts(node.inputs[1 - index], nodes)
                nodes.append(node)
                break
    tensor = get_const_tensor(value)
    if tensor is None or tensor.size != features or tensor.shape.numpy()[-1] != features:
        return None
    return value, offset, nodes


def _number(value: ir.Value | None) -> float | None:
    source = None if value is None else constant_source(value)[0]
    tensor = None if source is None else get_const_tensor(source)
    return float(np.asarray(tensor.numpy()).reshape(())) if tensor is not None and tensor.size == 1 else None


def _match_normalize(value: ir.Value, nodes: list[ir.Node], features: int) -> tuple[ir.Value, float] | None:
    """x / sqrt(mean(x^2) + epsilon), as a Div, or as a Mul by a Reciprocal, a Div(1, .) or a Pow(., -0.5)."""
    node = value.producer()
    if is_op(node, "Div"):
        orders = [(node.inputs[0], _match_root(node.inputs[1], nodes))]
    elif is_op(node, "Mul"):
        orders = [(node.inputs[i], _match_inverse_root(node.inputs[1 - i], nodes)) for i in (0, 1)]
    else:
        return None
    for x, radicand in orders:
        epsilon = None if radicand is None else _match_mean_square(radicand, x, nodes)
        if epsilon is not None:
            nodes.append(node)
            return _strip_casts(x, nodes), epsilon
    return None


def _match_inverse_root(value: ir.Value, nodes: list[ir.Node]) -> ir.Value | None:
    node = value.producer()
    if is_op(node, "Reciprocal"):
        root = node.inputs[0]
    elif is_op(node, "Div") and _number(node.inputs[0]) == 1.0:
        root = node.inputs[1]
    elif is_op(node, "Pow") and _number(node.inputs[1]) == -0.5:
        nodes.append(node)
        return node.inputs[0]
    else:
        return None
    nodes.append(node)
    return _match_root(root, nodes)


def _match_root(value: ir.Value, nodes: list[ir.Node]) -> ir.Value | None:
    node = value.producer()
    if is_op(node, "Sqrt") or (is_op(node, "Pow") and _number(node.inputs[1]) == 0.5):
        nodes.append(node)
        return node.inputs[0]
    return None


def _match_mean_square(value: ir.Value, x: ir.Value, nodes: list[ir.Node]) -> float | None:
    """Epsilon of mean(x^2) + epsilon over the last axis."""
    add = value.producer()
    if not is_op(add, "Add"):
        return None
    for index in (0, 1):
        epsilon, mean = _number(add.inputs[index]), add.inputs[1 - index].producer()
        if epsilon is None or not is_op(mean, "ReduceMean") or not attribute(mean, "keepdims", 1):
            continue
        axes = attribute(mean, "axes", None)
        if axes is None and len(mean.inputs) > 1 and mean.inputs[1] is not None:
            tensor = get_const_tensor(mean.inputs[1])
            axes = None if tensor is None else tensor.numpy().reshape(-1).tolist()
        rank = None if x.shape is None else len(x.shape)
        square = mean.inputs[0].producer()
        squares = (is_op(square, "Pow") and square.inputs[0] is x and _number(square.inputs[1]) == 2.0) or (
            is_op(square, "Mul") and square.inputs[0] is x and square.inputs[1] is x
        )
        if squares and axes is not None and list(axes) in ([-1], [None if rank is None else rank - 1]):  # type: ignore[call-overload]
            nodes += [add, mean, square]
            return epsilon
    return None
