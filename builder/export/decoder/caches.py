"""Caches that transformers' modeling code appends to, of fixed capacity, at a position per sequence; and states of
fixed size, which it replaces."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from trt_nvfp4.builder.export.decoder.ops import append

_STATES = (
    "it has layers with a state of their own arithmetic (see docs/how_to/hybrids.md for those that are known), beside "
    "the keys and values of every token"
)


class UnsupportedCacheError(Exception):
    """A model keeps what is neither keys and values of every token nor a state that `recurrent` knows."""


class UnknownStateError(UnsupportedCacheError, AttributeError):
    """A model's code reads what caches of its own have, and `hasattr` did not ask."""

    def __init__(self, name: str) -> None:
        super().__init__(f"its code reads '{name}' of its cache, which holds only the keys and values of every token")


class Slot(NamedTuple):
    """A tensor of a layer's: `key` or `value`, or a state such as `conv` or `recurrent`."""

    layer: int
    part: str

    @property
    def is_state(self) -> bool:
        return self.part not in ("key", "value")


class OneLength:
    """A number of cached tokens for code that compares it, but cannot take one per sequence: it is 0, and raises where
    the model computes with it."""

    def __init__(self, value: Any = 0) -> None:
        self._value = value

    def __add__(self, other: Any) -> "OneLength":
        return OneLength(self._value + other)

    __radd__ = __add__

    def __rsub__(self, other: Any) -> "OneLength":
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
        self.given: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}

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

    def advance(
        self,
        kind: str,
        empty: torch.Tensor,
        step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of `step` for the layer's next state of this kind, and the new state, which is kept. `empty` is
        the state before the first token."""
        count = sum(name.startswith(kind) for name in self.states)
        name = f"{kind}_{count}" if count else kind
        result, self.states[name] = step(self.given.get(name, empty))
        return result, self.states[name]

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
    """Caches of all layers, and states: `given` are the tensors of `slots`."""

    def __init__(
        self,
        past_length: torch.Tensor,
        capacity: int,
        layers: int,
        slots: Sequence[Slot],
        given: Sequence[torch.Tensor],
        counts: bool = True,
        new_length: torch.Tensor | None = None,
    ) -> None:
        """`new_length` [batch] are the valid tokens of this step; None for models without states."""
        self.steps = [StepLayer(past_length, capacity, counts) for _ in range(layers)]
        self._past_length, self._new_length = past_length, new_length
        self._current: StepLayer | None = None
        self._unread = False
        super().__init__(layers=list(self.steps))
        for (layer, part), tensor in zip(slots, given, strict=True):
            step = self.steps[layer]
            if part == "key":
                step.keys = tensor
            elif part == "value":
                step.values = tensor
            else:
                step.given[part] = tensor

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where masks begin: the first new token's position, of each sequence."""
        return self._past_length[:, None]

    @property
    def new_length(self) -> torch.Tensor:
        if self._new_length is None:
            raise UnsupportedCacheError(_STATES)
        return self._new_length

    def unpadded(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, ...] with 0 in place of padding."""
        valid = torch.arange(tensor.shape[1], device=tensor.device) < self.new_length[:, None]
        return torch.where(valid.reshape(*valid.shape, *[1] * (tensor.dim() - 2)), tensor, 0)

    def enter(self, layer: int) -> None:
        """Let the next states be this layer's."""
        self._current = self.steps[layer]

    def advance(
        self, kind: str, empty: torch.Tensor, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepLayer.advance`, of the layer that was entered last."""
        if self._current is None:
            raise UnsupportedCacheError(_STATES)
        self._unread = False
        return self._current.advance(kind, empty, step)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that code runs its function for any number of tokens, whose stand-in knows the state."""
        self.enter(layer_idx)

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """The new tokens: what stands before them is added where they are computed with."""
        self.enter(layer_idx)
        if self._unread:
            raise UnsupportedCacheError(_STATES)
        self._unread = True
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        if not any(not name.startswith("conv") for name in self.steps[layer_idx].states):
            raise UnsupportedCacheError(_STATES)
        return recurrent_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        """The keys [batch, capacity, dim] by which a layer chooses the tokens that it attends to, with the new ones."""
        self.enter(layer_idx)
        keys = indexer_key_states
        empty = keys.new_zeros((keys.shape[0], 1, self.steps[layer_idx].capacity, keys.shape[-1]))

        def appended(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = append(state, keys[:, None], self._past_length)
            return state[:, 0], state

        return self.advance("indexer", empty, appended)[0]

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownStateError(name)

    @property
    def slots(self) -> list[Slot]:
        """The tensors that were appended to or replaced: keys and values of every layer, then all states."""
        if self._unread:
            raise UnsupportedCacheError(_STATES)
        appended = [number for number, layer in enumerate(self.steps) if layer.is_initialized]
        caches = [Slot(number, part) for number in appended for part in ("key", "value")]
        return caches + [Slot(number, part) for number, layer in enumerate(self.steps) for part in layer.states]

    def tensors(self, slots: Sequence[Slot]) -> Iterator[torch.Tensor]:
        for number, part in slots:
            layer = self.steps[number]
            tensor = {"key": layer.keys, "value": layer.values, **layer.states}[part]
            assert tensor is not None
            yield tensor
