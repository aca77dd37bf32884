"""Positions that a decoder computes by itself, from the length of its caches or from its mask.

They are the same for all sequences, so that the contract's, one per sequence, take their place.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.patterns.attention.growing import NEW, computed

_LENGTHS = (0, 5, 11)  # of the caches, that values are compared for
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def computed_positions(model: ir.Model, past: Mapping[str, tuple[int, int]]) -> list[tuple[ir.Value, int]]:
    """Values that hold the new tokens' positions, and along which axis; all their other sizes are 1.

    `past`: (kv_heads, head_dim) of the caches by name. Positions of no axis before theirs are none: there is no place
    for sequences.
    """
    candidates = _integers(model.graph, past)
    if not candidates:
        return []
    try:
        tables = [computed(model, candidates, length, past) for length in _LENGTHS]
    except Exception:  # ONNX Runtime's own error types: what is left over is refused by name
        return []
    found = []
    for value, *arrays in zip(candidates, *tables, strict=True):
        expected = [np.arange(length, length + NEW) for length in _LENGTHS]
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
