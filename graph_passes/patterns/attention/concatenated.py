"""Attention as torch exports it: new keys and values are joined to the past ones, and products and Softmax follow."""

import math
from collections.abc import Callable, Iterator

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, ints_attribute, is_op, operand, optional_operand, rank

from .types import CachedAttention, DecoderError

# What repeats heads for the groups of queries, and changes the layout.
_LAYOUT = ("Transpose", "Reshape", "Expand", "Unsqueeze", "Cast", "Identity")


def match_concatenated(softmax: ir.Node) -> CachedAttention | None:
    """The attention around a Softmax whose keys and values both are a graph's input and what is new; else None. Raises
    DecoderError for one without a mask, which sees later tokens, and for heads repeated in another order."""
    if not is_op(softmax, "Softmax") or not _over_keys(softmax) or not (product := product_behind(softmax, _passed)):
        return None
    value_cache, value_factor = joined(operand(product, 1))
    if value_cache is None or value_factor != 1:
        return None
    scores, mask = without_mask(operand(softmax, 0))
    scores, factor = without_factor(scores)
    first = scores.producer()
    if not is_op(first, "MatMul"):
        return None
    query, query_factor = without_factor(operand(first, 0))
    key_cache, key_factor = joined(operand(first, 1))
    if key_cache is None:
        return None
    if mask is None:
        raise DecoderError(f"node '{softmax.name}' (Softmax) has no mask that hides later tokens")
    return CachedAttention(
        node=softmax,
        query=query,
        key=operand(key_cache, 1),
        value=operand(value_cache, 1),
        past=(operand(key_cache, 0), operand(value_cache, 0)),
        present=(key_cache.outputs[0], value_cache.outputs[0]),
        result=product.outputs[0],
        scale=factor * query_factor * key_factor,
        flat=False,
        mask=mask,
    )


def _over_keys(softmax: ir.Node) -> bool:
    """Whether its probabilities are those of one query's keys."""
    axis, dimensions = softmax.attributes.get_int("axis", -1), rank(operand(softmax, 0)) or 4
    return axis in (-1, dimensions - 1)


def _passed(user: ir.Node, value: ir.Value) -> bool:
    """Casts, and the replacement of NaN, in rows without a key, by a constant."""
    return is_op(user, "Cast", "Identity", "Dropout") or replaces_nan(user, value)


def product_behind(softmax: ir.Node, passed: Callable[[ir.Node, ir.Value], bool]) -> ir.Node | None:
    """The product of probabilities with the values, behind nodes that are `passed`: the readers of a value."""
    value = softmax.outputs[0]
    while True:
        users = [node for node in value.consumers() if not is_op(node, "IsNaN")]
        if len(users) != 1:
            return None
        (user,) = users
        if is_op(user, "MatMul"):
            return user if user.inputs[0] is value else None
        if not passed(user, value):
            return None
        value = user.outputs[0]


def replaces_nan(node: ir.Node, value: ir.Value) -> bool:
    """Where that gives `value`, and 0 in place of its NaN."""
    if not is_op(node, "Where") or node.inputs[2] is not value or number(operand(node, 1)) != 0:
        return False
    test = operand(node, 0).producer()
    return is_op(test, "IsNaN") and test.inputs[0] is value


def without_mask(scores: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """(what a mask is applied to, the mask); the mask of a Where says which scores count."""
    node = _through(scores, ("Cast", "Identity")).producer()
    if is_op(node, "Add"):
        for index in (0, 1):
            inner, _ = without_factor(operand(node, index))
            if is_op(inner.producer(), "MatMul"):
                return operand(node, index), operand(node, 1 - index)
    if is_op(node, "Where"):
        inner, _ = without_factor(operand(node, 1))
        if is_op(inner.producer(), "MatMul"):
            return operand(node, 1), operand(node, 0)
    return scores, None


def without_factor(value: ir.Value) -> tuple[ir.Value, float]:
    """(what scalars multiply, their product)."""
    factor = 1.0
    while True:
        node = value.producer()
        if is_op(node, "Cast", "Identity"):
            value = operand(node, 0)
            continue
        found = _scalar(node)
        if found is None:
            return value, factor
        value, by = found
        factor *= by


def _scalar(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    if not is_op(node, "Mul", "Div"):
        return None
    for index in (0, 1) if node.op_type == "Mul" else (1,):
        by = number(operand(node, index))
        if by is not None:
            return operand(node, 1 - index), by if node.op_type == "Mul" else 1 / by
    return None


def number(value: ir.Value) -> float | None:
    """A scalar constant's value, or what is computed from such: exporters write 1 / sqrt(sqrt(head_dim))."""
    tensor = get_const_tensor(value)
    if tensor is not None:
        return float(tensor.numpy().reshape(-1)[0]) if tensor.size == 1 else None
    node = value.producer()
    if is_op(node, "Cast", "Identity", "Sqrt"):
        inner = number(operand(node, 0))
        return None if inner is None else math.sqrt(inner) if node.op_type == "Sqrt" else inner
    if is_op(node, "Div", "Mul", "Pow"):
        left, right = number(operand(node, 0)), number(operand(node, 1))
        if left is None or right is None:
            return None
        return (
            left / right if node.op_type == "Div" else left * right if node.op_type == "Mul" else math.pow(left, right)
        )
    return None


def joined(value: ir.Value) -> tuple[ir.Node | None, float]:
    """(the Concat of past and new that `value` repeats and turns, the scalars that multiply it). Raises DecoderError
    where the heads are repeated as a whole: queries of a group are neighbours."""
    factor = 1.0
    for value, by in upwards(value):  # noqa: B020
        factor *= by
        node = value.producer()
        if is_op(node, "Expand") and not _repeats_each(node):
            raise DecoderError(f"node '{node.name}' (Expand) does not repeat each head of keys and values by itself")
        if is_op(node, "Concat") and len(node.inputs) == 2 and operand(node, 0).is_graph_input():
            rank = len(node.outputs[0].shape or (0,) * 4)
            return (node, factor) if node.attributes["axis"].as_int() % rank == rank - 2 else (None, 1.0)
    return None, 1.0


def _repeats_each(expand: ir.Node) -> bool:
    """Whether the copies of a head stand beside it: [batch, heads, copies, tokens, dim]; other ranks repeat nothing."""
    value = operand(expand, 0)
    if rank(expand.outputs[0]) not in (None, 5):
        return True
    made = value.producer()
    if is_op(made, "Unsqueeze"):
        axes = constant_integers(optional_operand(made, 1)) or ints_attribute(made, "axes")
        return axes in ([2], [-3])
    return value.shape is None or len(value.shape) != 5 or value.shape[2] == 1


def upwards(value: ir.Value) -> Iterator[tuple[ir.Value, float]]:
    yield value, 1.0
    while (node := value.producer()) is not None:
        by = 1.0
        if (found := _scalar(node)) is not None:
            value, by = found
        elif is_op(node, *_LAYOUT):
            value = operand(node, 0)
        else:
            return
        yield value, by


def _through(value: ir.Value, op_types: tuple[str, ...]) -> ir.Value:
    while is_op(node := value.producer(), *op_types):
        value = operand(node, 0)
    return value
