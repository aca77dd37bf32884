"""Recognises a decoder's mask and rotary embedding by their values at positions of the cache."""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.patterns.attention.evaluate import Part
from trt_nvfp4.graph_passes.subgraphs.attention import Layout, Projection, Rotation
from trt_nvfp4.plugins.ops.cached_attention import ROPE_HALVES, ROPE_INTERLEAVED, ROPE_NONE

# Below this a score does not count: exporters write -inf, the smallest float of a type, or -1e4.
_HIDDEN = -1e4
_NEW = 3  # tokens of a probe; fewer where the cache holds fewer
_CHUNK = 1024  # positions of which tables are read at once
#: Largest error, relative to the largest value, of what is computed in a type.
TOLERANCE = {ir.DataType.FLOAT: 1e-4, ir.DataType.FLOAT16: 5e-3, ir.DataType.BFLOAT16: 1e-4}  # widened


def window_of(model: ir.Model, mask: ir.Value, capacity: int) -> int:
    """How many tokens a query sees, itself included; 0: all before it. Raises ValueError for any other mask."""
    new = min(_NEW, capacity)
    past = sorted({0, (capacity - new) // 2, capacity - new})
    (found,) = Part(model, [], [mask]).run(past, new)
    seen = found if found.dtype == np.bool_ else found > _HIDDEN
    if found.dtype != np.bool_ and found[seen].any():
        raise ValueError(f"its mask '{mask.name}' also adds to scores that count, as ALiBi does")
    positions = np.array(past)[:, None] + np.arange(new)
    distance = positions[:, None, :, None] - np.arange(capacity)
    if np.ndim(seen) != 4 or seen.shape[-1] != capacity:
        raise ValueError(f"its mask '{mask.name}' is not [batch, 1, new, {capacity}]")
    seen = np.broadcast_to(seen, (len(past), seen.shape[1], new, capacity))
    window = int(seen[-1, 0, -1].sum())
    visible = (distance >= 0) & (distance < window)
    if not np.array_equal(seen, np.broadcast_to(visible, seen.shape)):
        raise ValueError(f"its mask '{mask.name}' is neither causal nor of a window")
    return 0 if window == capacity else window


def rotation_of(
    model: ir.Model, source: Projection, rotated: ir.Value, head_dim: int, capacity: int
) -> Rotation | None:
    """The rotary embedding between `source`, without its norm, and `rotated` [batch, heads, new, head_dim]; None for
    other functions."""
    part = Part(model, [source.value], [rotated])
    new = min(_NEW, capacity)
    past = [0, (capacity - new) // 2, capacity - new]
    dtype = rotated.dtype or ir.DataType.FLOAT
    generator = np.random.default_rng(0)
    x = generator.standard_normal((len(past), source.heads, new, head_dim)).astype(np.float32)
    expected = _run(part, source, past, x)
    for rotation in _candidates(part, source, x, expected, capacity):
        rows = np.minimum(np.array(past)[:, None] + np.arange(new), len(rotation.cos) - 1)
        error = np.abs(rotate(x, rotation, rows) - expected).max()
        if error <= TOLERANCE.get(dtype, 0.0) * max(1.0, np.abs(expected).max()):
            return rotation
    return None


def rotate(x: np.ndarray, rotation: Rotation, rows: np.ndarray) -> np.ndarray:
    """x [batch, heads, new, head_dim] rotated by rows [batch, new] of the tables."""
    if rotation.kind == ROPE_NONE:
        return x
    half = rotation.cos.shape[1]
    cos, sin = rotation.cos[rows][:, None], rotation.sin[rows][:, None]
    y: np.ndarray = x.copy()
    first, second = _pairs(rotation.kind, half)
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _pairs(kind: int, half: int) -> tuple[slice, slice]:
    if kind == ROPE_HALVES:
        return slice(0, half), slice(half, 2 * half)
    return slice(0, 2 * half, 2), slice(1, 2 * half, 2)


def _candidates(
    part: Part, source: Projection, x: np.ndarray, expected: np.ndarray, capacity: int
) -> Iterator[Rotation]:
    none = np.zeros((1, 1), np.float32)
    yield Rotation(ROPE_NONE, none, none)
    changed = np.flatnonzero((x != expected).any(axis=(0, 1, 2)))
    if not len(changed):
        return
    head_dim = x.shape[-1]
    # Frequencies near 0 may change nothing, so that the whole head may be rotated where a part seems to be.
    for rotary in dict.fromkeys((int(changed[-1]) // 2 * 2 + 2, head_dim // 2 * 2)):
        for kind in (ROPE_HALVES, ROPE_INTERLEAVED):
            first, second = _pairs(kind, rotary // 2)
            tables = _ones_at(part, source, first, head_dim, capacity)
            yield Rotation(kind, *(np.ascontiguousarray(tables[:, where]) for where in (first, second)))


def _ones_at(part: Part, source: Projection, where: slice, head_dim: int, capacity: int) -> np.ndarray:
    """[capacity, head_dim]: what becomes of ones at some dimensions, of each position: cosines, and sines."""
    rows = []
    for start in range(0, capacity, _CHUNK):
        x = np.zeros((1, source.heads, min(_CHUNK, capacity - start), head_dim), np.float32)
        x[..., where] = 1
        rows.append(_run(part, source, [start], x)[0, 0])
    return np.concatenate(rows)


def _run(part: Part, source: Projection, past: list[int], x: np.ndarray) -> np.ndarray:
    """The part's output for `x` [batch, heads, new, head_dim], given in the source's layout."""
    (y,) = part.run(past, x.shape[2], [laid_out(x, source.layout)])
    return y


def laid_out(x: np.ndarray, layout: Layout) -> np.ndarray:
    """x [batch, heads, new, head_dim] in another layout."""
    if layout == Layout.HEADS_FIRST:
        return x
    x = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    return x if layout == Layout.TOKENS_FIRST else x.reshape(*x.shape[:2], -1)
