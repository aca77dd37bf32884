"""Shapes and types of caches, states and logits. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

import numpy as np

from trt_nvfp4.common.cache_names import layer_names, stacked_layers, stacked_names, state_names

from ..model.decoder_contract import LOGIT_TOKENS, Decoder


def logit_rows(decoder: Decoder, rows: int, new: np.ndarray, count: int) -> np.ndarray:
    """Where the logits of each sequence's last `count` valid tokens lie along axis 1 of a step's logits: int64
    [batch, count]. `rows` is the size of that axis, `new` [batch] the step's valid tokens. A sequence with fewer
    repeats one."""
    end = new[:, None] if decoder.all_logits else np.full((len(new), 1), rows)
    found: np.ndarray = np.maximum(end - count + np.arange(count), 0)
    return found


def last_logits(decoder: Decoder, logits: np.ndarray, new: np.ndarray, count: int) -> np.ndarray:
    """[batch * count, vocab] in float32: these rows of `logits`, [batch, rows, vocab], sequence by sequence."""
    rows = logit_rows(decoder, logits.shape[1], new, count)
    last: np.ndarray = np.take_along_axis(logits, rows[..., None], 1).astype(np.float32)
    return last.reshape(-1, logits.shape[-1])


def padded_step(tokens: int, longest_past: int, capacity: int) -> int:
    """The length that a step of few `tokens` is padded to, so that few lengths are recorded as CUDA graphs: a power of
    two up to LOGIT_TOKENS; `tokens` itself for more of them, and where the padding would reach behind the caches."""
    padded = 1 << (tokens - 1).bit_length()
    return padded if padded <= LOGIT_TOKENS and longest_past + padded <= capacity else tokens


def cache_shapes(decoder: Decoder, batch: int) -> dict[str, tuple[int, ...]]:
    """Shapes of every cache, [batch, kv_heads, capacity, head_dim], with [layers, 2] in front where layers share one;
    and of every state, [batch, ...]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, heads in enumerate(decoder.kv_heads):
        sizes = (decoder.head_dim[layer], decoder.value_head_dim[layer])
        for name, size in zip(layer_names(layer)[0], sizes, strict=True):
            shapes[name] = (batch, heads, decoder.capacity, size)
    for first, last in decoder.stacked:
        names = [name for layer in range(first, last + 1) for name in layer_names(layer)[0]]
        shapes[stacked_names(first, last)[0]] = (last - first + 1, 2, *shapes[names[0]])
    shapes |= {state_names(state.name)[0]: (batch, *state.shape) for state in decoder.states}
    return {name: shapes[name] for name in decoder.caches}


def row_axis(name: str) -> int:
    """The axis of a cache's or state's batch."""
    return 0 if stacked_layers(name) is None else 2


def cache_types(decoder: Decoder) -> dict[str, str]:
    """Types of every cache and state, as `Decoder.cache_dtype`, or int8 for bytes of E4M3."""
    types = dict.fromkeys(decoder.caches, decoder.cache_dtype) | dict.fromkeys(decoder.fp8_caches, "int8")
    return types | {state_names(state.name)[0]: state.dtype for state in decoder.states}
