"""Shapes of caches and logits. Needs NumPy alone: bundles carry this module."""

from __future__ import annotations

import numpy as np

from trt_nvfp4.common.cache_names import layer_names, stacked_names

from ..export.decoder_contract import Decoder


def last_logits(logits: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[batch, vocab] in float32, of each sequence's last valid token; `logits` is [batch, 1 or tokens, vocab]."""
    at = new - 1 if logits.shape[1] > 1 else np.zeros_like(new)
    last: np.ndarray = logits[np.arange(len(new)), at].astype(np.float32)
    return last


def cache_shapes(decoder: Decoder, batch: int) -> dict[str, tuple[int, ...]]:
    """Of every cache: [batch, kv_heads, capacity, head_dim], or behind [layers, 2] where layers have one together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, heads in enumerate(decoder.kv_heads):
        sizes = (decoder.head_dim[layer], decoder.value_head_dim[layer])
        for name, size in zip(layer_names(layer)[0], sizes, strict=True):
            shapes[name] = (batch, heads, decoder.capacity, size)
    for first, last in decoder.stacked:
        names = [name for layer in range(first, last + 1) for name in layer_names(layer)[0]]
        shapes[stacked_names(first, last)[0]] = (last - first + 1, 2, *shapes[names[0]])
    return {name: shapes[name] for name in decoder.caches}
