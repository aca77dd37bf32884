"""Positions that a decoder computes by itself, from the length of its caches or from its mask.

They are the same for all sequences, so that the contract's, one per sequence, take their place.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.patterns.attention.growing import NEW, computed

_LENGTHS = (0, 5, 11)  # of the caches, that values are always compared for
_MOST_VALUES = 64  # of a constant that may bound positions
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def telling_lengths(graph: ir.Graph, capacity: int) -> list[int]:
    """Lengths of the caches, ascending, at which values that depend on positions are compared: both sides of every
    constant in their arithmetic, the start and the end of `capacity`."""
    last = max(0, capacity - NEW)
    found = {*_LENGTHS, last}
    for number in _position_constants(graph):
        found |= {number - 1, number + NEW - 1}
    return sorted(length for length in found if 0 <= length <= last)


def _position_constants(graph: ir.Graph) -> set[int]:
    """Numbers above 1 in constants that meet values of the lengths of inputs, of masks and of positions only."""
    known: dict[ir.Value, None] = {}
    numbers: set[int] = set()
    for value in graph.inputs:
        if "mask" in (value.name or "") or "position" in (value.name or ""):
            known[value] = None
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        constants = [tensor for value in inputs if (tensor := get_const_tensor(value)) is not None]
        of_lengths = [value for value in inputs if value in known]
        if not is_op(node, "Shape") and (not of_lengths or len(of_lengths) + len(constants) < len(inputs)):
            continue
        known.update(dict.fromkeys(node.outputs))
        for tensor in constants:
            if tensor.size <= _MOST_VALUES and tensor.dtype.is_integer() | tensor.dtype.is_floating_point():
                values = np.abs(np.asarray(tensor.numpy(), np.float64)).reshape(-1)
                numbers |= {int(number) for number in values if 1 < number < np.iinfo(np.int32).max}
    return numbers


def computed_positions(
    model: ir.Model, past: Mapping[str, tuple[int, int]], lengths: Sequence[int]
) -> list[tuple[ir.Value, int]]:
    """Values that hold the new tokens' positions, and along which axis; all their other sizes are 1.

    `past`: (kv_heads, head_dim) of the caches by name; `lengths`: of the caches, at which values are compared.
    Positions with no axis before theirs are left out: they have no place for sequences.
    """
    candidates = _integers(model.graph, past)
    if not candidates:
        return []
    try:
        tables = computed(model, candidates, lengths, past)
    except Exception:  # ONNX Runtime's own error types: what is left over is refused by name
        return []
    found = []
    for value, *arrays in zip(candidates, *tables, strict=True):
        expected = [np.arange(length, length + NEW) for length in lengths]
        same = all(a.size == NEW and np.array_equal(a.reshape(-1), e) for a, e in zip(arrays, expected, strict=True))
        if same and (axis := arrays[0].shape.index(NEW)) > 0:
            found.append((value, axis))
    return found


def _integers(graph: ir.Graph, past: Mapping[str, tuple[int, int]]) -> list[ir.Value]:
    """Integers that are computed from a cache's shape, or from an input that is a mask or positions, in order."""
    reached: dict[ir.Value, None] = {}
    for value in graph.inputs:
        if value.name not in past and ("mask" in (value.name or "") or "position" in (value.name or "")):
            reached[value] = None
    for node in graph:
        of_cache = is_op(node, "Shape") and node.inputs[0] is not None and node.inputs[0].name in past
        if of_cache or any(value in reached for value in node.inputs):
            # A Cast or comparison may come between, and gives no positions itself.
            reached.update(dict.fromkeys(output for output in node.outputs if _is_whole(output)))
    return [value for value in reached if value.producer() is not None and value.dtype in _INTEGERS]


def _is_whole(value: ir.Value) -> bool:
    return value.dtype in _INTEGERS or value.dtype == ir.DataType.BOOL
