"""Where queries, keys and values come from: what lies in front of rotary embeddings, norms and changes of layout."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand
from trt_nvfp4.graph_passes.patterns.attention.evaluate import depends_on_data, leaves_of
from trt_nvfp4.graph_passes.subgraphs.attention import Layout, Projection

# Operators whose result is linear in operand 0 and in no other operand.
_OF_FIRST = (
    *("Neg", "Slice", "Split", "Reshape", "Transpose", "Cast", "Identity", "Unsqueeze", "Squeeze", "Gather"),
    "RotaryEmbedding",
)
_LAYOUT = ("Reshape", "Transpose", "Identity")


def by_head(value: ir.Value, heads: int) -> Projection:
    """[batch, heads, new, head_dim] as it is."""
    return Projection(value, Layout.HEADS_FIRST, heads)


def in_front_of_rotation(
    value: ir.Value, heads: int, head_dim: int, position: Mapping[ir.Node, int], known: dict[ir.Value, bool]
) -> Projection:
    """The farthest tensor of all heads, of its type, that `value` [batch, heads, new, head_dim] is linear in,
    beside lengths. `known` remembers what depends on data."""
    found = by_head(value, heads)
    frontier = {value}
    while True:
        if len(frontier) == 1:
            (only,) = frontier
            layout = _layout(only, heads, head_dim)
            if layout is not None and only.dtype == value.dtype:
                found = Projection(only, layout, heads)
        last = max(frontier, key=lambda value: _place(value, position))
        operands = _linear_operands(last, known)
        if operands is None:
            return found
        frontier.discard(last)
        frontier.update(operands)


def in_front_of_layout(value: ir.Value, heads: int, head_dim: int) -> Projection | None:
    """The farthest tensor of all heads that `value` only rearranges."""
    found: Projection | None = None
    while True:
        layout = _layout(value, heads, head_dim)
        if layout is not None:
            found = Projection(value, layout, heads)
        node = value.producer()
        if not is_op(node, *_LAYOUT):
            return found
        value = operand(node, 0)


def split_source(parts: Sequence[ir.Value]) -> ir.Value | None:
    """The value whose last axis consists of `parts` in order: outputs of one Split, or neighbouring Slices."""
    producers = [part.producer() for part in parts]
    first = producers[0]
    if is_op(first, "Split") and all(node is first for node in producers):
        axis, source = first.attributes.get_int("axis", 0), operand(first, 0)
        return source if tuple(parts) == tuple(first.outputs) and _is_last(axis, source) else None
    if not all(is_op(node, "Slice") for node in producers):
        return None
    end, source = 0, operand(producers[0], 0)  # type: ignore[arg-type]
    for node in producers:
        assert node is not None
        start, stop, axes = (constant_integers(node.inputs[index]) for index in (1, 2, 3))
        steps = constant_integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
        last = axes is not None and len(axes) == 1 and _is_last(axes[0], source)
        if operand(node, 0) is not source or not last or start != [end] or stop is None or steps != [1]:
            return None
        width = source.shape[-1] if source.shape is not None else None
        end = min(stop[0], width) if isinstance(width, int) else stop[0]
    return source if source.shape is not None and source.shape[-1] == end else None


def _place(value: ir.Value, position: Mapping[ir.Node, int]) -> int:
    node = value.producer()
    return -1 if node is None else position[node]


def _linear_operands(value: ir.Value, known: dict[ir.Value, bool]) -> list[ir.Value] | None:
    """The operands that the node of `value` is linear in; None where it is not linear."""
    node = value.producer()
    if node is None or node.domain:
        return None
    operands = [operand for operand in node.inputs if operand is not None]
    data = [operand for operand in operands if depends_on_data(operand, known)]
    if not data:
        return None
    if node.op_type in _OF_FIRST:
        return data if data == operands[:1] else None
    if node.op_type == "Mul":
        # By a table of positions; a constant is a norm's weight, or another factor.
        tables = [operand for operand in operands if operand not in data]
        return data if len(data) == 1 and all(leaves_of([table], ()) for table in tables) else None
    if node.op_type in ("Add", "Sub", "Concat"):
        return data if len(data) == len(operands) else None
    return None


def _layout(value: ir.Value, heads: int, head_dim: int) -> Layout | None:
    shape = value.shape
    if shape is None or shape[-1:] == () or not isinstance(shape[-1], int):
        return None
    if len(shape) == 3 and shape[2] == heads * head_dim and not isinstance(shape[1], int):
        return Layout.FLAT
    if len(shape) == 4 and shape[3] == head_dim:
        if shape[2] == heads and not isinstance(shape[1], int):
            return Layout.TOKENS_FIRST
        if shape[1] == heads and not isinstance(shape[2], int):
            return Layout.HEADS_FIRST
    return None


def _is_last(axis: int, value: ir.Value) -> bool:
    return axis == -1 or (value.shape is not None and axis == len(value.shape) - 1)
