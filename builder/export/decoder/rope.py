"""Rotary embeddings that depend on how long the sequence is, without a branch on the data.

transformers recomputes their frequencies while it runs. A graph holds both sets of frequencies and each sequence
takes its own.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def switch_length(model: Any, capacity: int) -> int | None:
    """The number of tokens beyond which the model's long frequencies hold (long rope); None where the capacity does
    not reach it."""
    lengths = [
        _original_length(part, kind) for part in model.modules() for kind in _kinds(part) if _is_long(part, kind)
    ]
    return min(lengths) if lengths and min(lengths) < capacity else None


@contextmanager
def without_branches(model: Any, capacity: int) -> Iterator[None]:
    """Within, rotary embeddings choose their frequencies in the graph.

    Dynamic scaling begins beyond the longest sequence that the configuration states, which no cache exceeds: the
    original frequencies hold.
    """
    changed = [part for part in model.modules() if any(_is_long(part, k) or _is_dynamic(part, k) for k in _kinds(part))]
    for part in changed:
        part.forward = _forward(part, capacity)
    try:
        yield
    finally:
        for part in changed:
            del part.forward


def _kinds(part: Any) -> list[str | None]:
    """The types of layers for which a rotary embedding has frequencies of their own; [None]: one for all."""
    kind = getattr(part, "rope_type", None)
    if not hasattr(part, "config") or kind is None:
        return []
    return list(kind) if isinstance(kind, dict) else [None]


def _type(part: Any, layer_type: str | None) -> str:
    return str(part.rope_type if layer_type is None else part.rope_type[layer_type])


def _is_long(part: Any, layer_type: str | None) -> bool:
    return _type(part, layer_type) == "longrope"


def _is_dynamic(part: Any, layer_type: str | None) -> bool:
    return "dynamic" in _type(part, layer_type)


def _original_length(part: Any, layer_type: str | None) -> int:
    parameters = part.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])


def _forward(part: Any, capacity: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    plain = inspect.unwrap(type(part).forward)

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        short = plain(part, x, position_ids, **extra)
        if not _is_long(part, layer_type) or _original_length(part, layer_type) >= capacity:
            return tuple(short)
        length = _original_length(part, layer_type)
        long = plain(_with_long_frequencies(part, layer_type, length), x, position_ids, **extra)
        beyond = (position_ids.max(dim=1).values >= length)[:, None, None]
        cos, sin = (torch.where(beyond, theirs, ours) for ours, theirs in zip(short, long, strict=True))
        return cos, sin

    return forward


def _with_long_frequencies(part: Any, layer_type: str | None, length: int) -> Any:
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[_type(part, layer_type)](
        part.config, torch.device("cpu"), seq_len=length + 1, **extra
    )
    other = copy.copy(part)
    other._buffers = {**part._buffers, f"{'' if layer_type is None else layer_type + '_'}inv_freq": frequencies}
    return other
