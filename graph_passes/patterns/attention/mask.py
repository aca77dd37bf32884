"""Recognises masks by their values: exporters compute the same mask in many ways."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.patterns.attention.growing import NEW, computed

from .types import DecoderError

# Below this a score does not count: exporters write -inf, the smallest float of a type, or -1e4.
_HIDDEN = -1e4


def window_of(
    model: ir.Model, mask: ir.Value, lengths: Sequence[int], past: Mapping[str, tuple[int, int]], where: str
) -> int | None:
    """How many tokens a query sees, itself included, where the mask is causal; None: all before it.

    Evaluates the mask behind each of `lengths` cached tokens, the last of which is the longest. `past`: (kv_heads,
    head_dim) of the caches by name. Raises DecoderError for any other mask.
    """
    try:
        found = [array for (array,) in computed(model, [mask], lengths, past)]
    except Exception as error:  # ONNX Runtime's own error types
        raise DecoderError(f"the mask of node '{where}' cannot be evaluated ({error})") from error
    visible = [_visible(array, length + NEW, where) for array, length in zip(found, lengths, strict=True)]
    longest = lengths[-1] + NEW
    window = int(visible[-1][-1].sum())
    for length, seen in reversed(list(zip(lengths, visible, strict=True))):
        distance = np.arange(length + NEW)[None] - np.arange(length, length + NEW)[:, None]
        if not np.array_equal(seen, (distance <= 0) & (distance > -window)):
            what = "is neither causal nor of a window" if length == lengths[-1] else "depends on more than positions"
            raise DecoderError(f"the mask of node '{where}' {what}")
    return None if window == longest else window


def _visible(found: np.ndarray, total: int, where: str) -> np.ndarray:
    """[new, past + new]: which keys count, by a mask's values."""
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
