"""Caches that transformers' modeling code appends to: of fixed capacity, at a position per sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from trt_nvfp4.builder.export.decoder_ops import append


class UnsupportedCacheError(Exception):
    """A model keeps another state than keys and values of every token."""


class UnknownStateError(UnsupportedCacheError, AttributeError):
    """A model's code reads what caches of its own have, and `hasattr` did not ask."""

    def __init__(self, name: str) -> None:
        super().__init__(f"its code reads '{name}' of its cache, which holds only the keys and values of every token")


class OneLength:
    """A number of cached tokens for code that compares it, but cannot take one per sequence: it says that there are
    none, and refuses to become a part of what the model computes."""

    def __init__(self, value: Any = 0) -> None:
        self._value = value

    def __add__(self, other: Any) -> OneLength:
        return OneLength(self._value + other)

    __radd__ = __add__

    def __rsub__(self, other: Any) -> OneLength:
        return OneLength(other - self._value)

    def __gt__(self, other: Any) -> bool:
        return bool(self._value > other)

    def __lt__(self, other: Any) -> bool:
        return bool(self._value < other)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise UnsupportedCacheError(
            "it computes with one number of cached tokens for the whole batch, and here each sequence has its own"
        )


class StepLayer(CacheLayerMixin):
    """The cache of one layer: keys and values [batch, kv_heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, past_length: torch.Tensor, capacity: int, counts: bool = True) -> None:
        """Without `counts` its length is a OneLength."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.past_length, self.capacity, self._counts = past_length, capacity, counts

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Empty caches, where none were given."""
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_initialized:
            raise UnsupportedCacheError("it appends to the cache of a layer twice in one step")
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        self.is_initialized = True
        assert self.keys is not None
        assert self.values is not None
        self.keys = append(self.keys, key_states, self.past_length)
        self.values = append(self.values, value_states, self.past_length)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> Any:
        """Cached tokens [batch, 1], so that sums with positions of one sequence broadcast."""
        return self.past_length[:, None] if self._counts else OneLength()

    def get_max_length(self) -> int:
        return self.capacity

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownStateError(name)


class StepCache(Cache):
    """Caches of all layers; `given` are keys and values of the layers in `numbers`, alternating."""

    def __init__(
        self,
        past_length: torch.Tensor,
        capacity: int,
        layers: int,
        numbers: Sequence[int],
        given: Sequence[torch.Tensor],
        counts: bool = True,
    ) -> None:
        self.steps = [StepLayer(past_length, capacity, counts) for _ in range(layers)]
        self._past_length = past_length
        super().__init__(layers=list(self.steps))
        for number, key, value in zip(numbers, given[::2], given[1::2], strict=True):
            self.steps[number].keys, self.steps[number].values = key, value

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where masks begin: the first new token's position, of each sequence."""
        return self._past_length[:, None]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCacheError(
            "beside attention it has layers with a state of another kind (of a convolution, or linear attention), and "
            "a cache here holds the keys and values of every token"
        )

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        try:
            return bool(super().has_previous_state(*args, **kwargs))
        except ValueError:  # of the layers of attention, to which that does not apply
            self._refuse()

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownStateError(name)

    @property
    def appended(self) -> list[int]:
        """Numbers of the layers that appended to a cache of their own."""
        return [number for number, layer in enumerate(self.steps) if layer.is_initialized]

    def tensors(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Keys and values of the layers in `numbers`, alternating."""
        for number in numbers:
            for tensor in (self.steps[number].keys, self.steps[number].values):
                assert tensor is not None
                yield tensor
