"""What a mask lets a token see, by its values: exporters compute the same mask in many ways."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from trt_nvfp4.common.onnx_runtime import onnxruntime

from .types import DecoderError

# Below this a score does not count: exporters write -inf, the smallest float of a type, or -1e4.
_HIDDEN = -1e4
_NEW = 3


def window_of(
    model: ir.Model, mask: ir.Value, capacity: int, past: Mapping[str, tuple[int, int]], where: str
) -> int | None:
    """How many tokens a query sees, itself included, where the mask is causal; None: all before it.

    Evaluates the mask over a cache of nearly `capacity` tokens, and over an empty one. `past`: (kv_heads, head_dim) of
    the caches by name. Raises DecoderError for any other mask.
    """
    far = _visible(model, mask, capacity - _NEW, past, where)
    distance = np.arange(capacity)[None] - np.arange(capacity - _NEW, capacity)[:, None]
    window = int(far[-1].sum())
    if not np.array_equal(far, (distance <= 0) & (distance > -window)):
        raise DecoderError(f"the mask of node '{where}' is neither causal nor of a window")
    near = _visible(model, mask, 0, past, where)
    if not np.array_equal(near, np.tril(np.ones((_NEW, _NEW), bool)) & ~np.tril(np.ones((_NEW, _NEW), bool), -window)):
        raise DecoderError(f"the mask of node '{where}' depends on more than positions")
    return None if window == capacity else window


def _visible(
    model: ir.Model, mask: ir.Value, length: int, past: Mapping[str, tuple[int, int]], where: str
) -> np.ndarray:
    """[new, past + new]: which keys count, after `length` tokens."""
    total = length + _NEW
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None
        if value.name in past:
            heads, dim = past[value.name]
            assert value.dtype is not None
            feeds[value.name] = np.zeros((1, heads, length, dim), value.dtype.numpy())
        elif "mask" in value.name:
            feeds[value.name] = np.ones((1, total), np.int64)
        elif "position" in value.name:
            feeds[value.name] = np.arange(length, total)[None]
        else:
            feeds[value.name] = np.zeros((1, _NEW), np.int64)
    try:
        part = extract(model.graph, list(model.graph.inputs), [mask])
        proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version))
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        taken = {entry.name for entry in session.get_inputs()}
        (found,) = session.run(None, {name: array for name, array in feeds.items() if name in taken})
    except Exception as error:  # ONNX Runtime's own error types
        raise DecoderError(f"the mask of node '{where}' cannot be evaluated ({error})") from error
    rows = np.broadcast_to(found, (1, *found.shape[-3:])) if found.ndim > 2 else found
    rows = rows.reshape(-1, *rows.shape[-2:])
    if rows.dtype != np.bool_:
        hidden = rows <= _HIDDEN
        if (rows[~hidden] != 0).any():
            raise DecoderError(f"the mask of node '{where}' adds to scores that count, such as ALiBi")
        rows = ~hidden
    if (rows != rows[:1]).any() or rows.shape[-1] != total or rows.shape[-2] not in (1, _NEW):
        raise DecoderError(f"the mask of node '{where}' differs between heads, or has shape {found.shape}")
    return np.broadcast_to(rows[0], (_NEW, total))
