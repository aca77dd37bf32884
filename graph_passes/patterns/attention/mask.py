"""What a mask lets a token see, by its values: exporters compute the same mask in many ways."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.patterns.attention.growing import NEW, computed

from .types import DecoderError

# Below this a score does not count: exporters write -inf, the smallest float of a type, or -1e4.
_HIDDEN = -1e4


def window_of(
    model: ir.Model, mask: ir.Value, capacity: int, past: Mapping[str, tuple[int, int]], where: str
) -> int | None:
    """How many tokens a query sees, itself included, where the mask is causal; None: all before it.

    Evaluates the mask over a cache of nearly `capacity` tokens, and over an empty one. `past`: (kv_heads, head_dim) of
    the caches by name. Raises DecoderError for any other mask.
    """
    far = _visible(model, mask, capacity - NEW, past, where)
    distance = np.arange(capacity)[None] - np.arange(capacity - NEW, capacity)[:, None]
    window = int(far[-1].sum())
    if not np.array_equal(far, (distance <= 0) & (distance > -window)):
        raise DecoderError(f"the mask of node '{where}' is neither causal nor of a window")
    near = _visible(model, mask, 0, past, where)
    if not np.array_equal(near, np.tril(np.ones((NEW, NEW), bool)) & ~np.tril(np.ones((NEW, NEW), bool), -window)):
        raise DecoderError(f"the mask of node '{where}' depends on more than positions")
    return None if window == capacity else window


def _visible(
    model: ir.Model, mask: ir.Value, length: int, past: Mapping[str, tuple[int, int]], where: str
) -> np.ndarray:
    """[new, past + new]: which keys count, after `length` tokens."""
    total = length + NEW
    try:
        (found,) = computed(model, [mask], length, past)
    except Exception as error:  # ONNX Runtime's own error types
        raise DecoderError(f"the mask of node '{where}' cannot be evaluated ({error})") from error
    rows = np.broadcast_to(found, (1, *found.shape[-3:])) if found.ndim > 2 else found
    rows = rows.reshape(-1, *rows.shape[-2:])
    if rows.dtype != np.bool_:
        hidden = rows <= _HIDDEN
        if (rows[~hidden] != 0).any():
            raise DecoderError(f"the mask of node '{where}' adds to scores that count, such as ALiBi")
        rows = ~hidden
    if (rows != rows[:1]).any() or rows.shape[-1] != total or rows.shape[-2] not in (1, NEW):
        raise DecoderError(f"the mask of node '{where}' differs between heads, or has shape {found.shape}")
    return np.broadcast_to(rows[0], (NEW, total))
