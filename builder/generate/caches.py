"""Shapes of caches and logits. Needs NumPy alone: bundles carry this module."""

from __future__ import annotations

import numpy as np

from ..export.decoder_contract import Decoder


def last_logits(logits: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[batch, vocab] in float32, of each sequence's last valid token; `logits` is [batch, 1 or tokens, vocab]."""
    at = new - 1 if logits.shape[1] > 1 else np.zeros_like(new)
    last: np.ndarray = logits[np.arange(len(new)), at].astype(np.float32)
    return last


def cache_shapes(decoder: Decoder) -> dict[str, tuple[int, int, int]]:
    """[kv_heads, capacity, head_dim] of every cache, without the batch."""
    shapes = []
    for heads, key, value in zip(decoder.kv_heads, decoder.head_dim, decoder.value_head_dim, strict=True):
        shapes += [(heads, decoder.capacity, key), (heads, decoder.capacity, value)]
    return dict(zip(decoder.caches, shapes, strict=True))
