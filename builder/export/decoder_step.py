"""One step of a Hugging Face language model over caches of fixed capacity, as a Torch module that torch.onnx exports.

transformers' own modeling code runs; it is given a cache whose `update` appends at a position per sequence, a mask
that is computed from positions, and an attention function of operators that ONNX has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trt_nvfp4.builder.export.decoder_ops import append, attention
from trt_nvfp4.builder.export.decoder_rope import without_branches

#: Under this name transformers finds the attention and the mask of this module.
IMPLEMENTATION = "trt_nvfp4_cached"
#: Head sizes that TensorRT's fused attention has, in 16 bits.
FUSED_HEAD_SIZES = range(16, 257, 8)


class UnsupportedCacheError(Exception):
    """A model keeps another state than keys and values of every token."""


class StepLayer(CacheLayerMixin):
    """The cache of one layer: keys and values [batch, kv_heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, past_length: torch.Tensor, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.past_length, self.capacity = past_length, capacity

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
        return self.past_length[:, None]

    def get_max_length(self) -> int:
        return self.capacity


class StepCache(Cache):
    """Caches of all layers; `given` are keys and values of the layers in `numbers`, alternating."""

    def __init__(
        self,
        past_length: torch.Tensor,
        capacity: int,
        layers: int,
        numbers: Sequence[int],
        given: Sequence[torch.Tensor],
    ) -> None:
        self.steps = [StepLayer(past_length, capacity) for _ in range(layers)]
        super().__init__(layers=list(self.steps))
        for number, key, value in zip(numbers, given[::2], given[1::2], strict=True):
            self.steps[number].keys, self.steps[number].values = key, value

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


class Step(torch.nn.Module):
    """(input_ids, past_length, new_length, *caches) -> (logits, *caches).

    `numbers` are the layers that have caches of their own; `probe` finds them. With `masked`, the model is given a
    mask that holds for the whole capacity, for those that count their tokens by it.
    """

    def __init__(self, model: Any, capacity: int, all_logits: bool, masked: bool = False) -> None:
        super().__init__()
        self.model, self.capacity, self.all_logits, self.masked = model, capacity, all_logits, masked
        self.numbers: list[int] = []
        self.outputs: tuple[str, ...] = ()
        self._layers = layer_count(model)
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = "position_ids" in parameters or open_ended

    def probe(self) -> list[torch.Tensor]:
        """Empty caches for a batch of one, as the model's layers ask for them."""
        ids, length = torch.ones((1, 2), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        cache = StepCache(length, self.capacity, self._layers, (), ())
        self._run(ids, length, length + 2, cache)
        self.numbers = cache.appended
        return [torch.zeros_like(tensor) for tensor in cache.tensors(self.numbers)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, past_length, new_length, *caches = tensors
        cache = StepCache(past_length, self.capacity, self._layers, self.numbers, caches)
        logits = self._run(ids, past_length, new_length, cache)
        return (logits, *cache.tensors(self.numbers))

    def _run(
        self, ids: torch.Tensor, past_length: torch.Tensor, new_length: torch.Tensor, cache: StepCache
    ) -> torch.Tensor:
        # Padding repeats the last valid position: tables of positions have no row beyond the capacity, and rotary
        # embeddings that depend on the longest sequence see the true one.
        index = torch.arange(ids.shape[1], device=ids.device)[None]
        positions = past_length[:, None] + torch.minimum(index, new_length[:, None] - 1)
        extra = {"position_ids": positions} if self._takes_positions else {}
        if self.masked:
            extra["attention_mask"] = torch.ones_like(positions[:, :1]).expand(-1, self.capacity)
        with (
            cached_attention(self.model),
            without_branches(self.model, self.capacity),
            of_last_tokens(None if self.all_logits else self.model, new_length),
        ):
            found = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        logits: torch.Tensor = found.logits
        return logits


def layer_count(model: Any) -> int:
    numbers = [getattr(part, "layer_idx", None) for part in model.modules()]
    stated = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return max([stated, *(number + 1 for number in numbers if isinstance(number, int))])


@contextmanager
def of_last_tokens(model: Any, new_length: torch.Tensor) -> Iterator[None]:
    """Within, the model's head sees each sequence's last valid token alone; None leaves it all tokens."""
    if model is None:
        yield
        return

    def last(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        index = (new_length - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, index), *others

    hook = model.get_output_embeddings().register_forward_pre_hook(last)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def cached_attention(
    model: Any, attention_function: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Within, the model attends by `attention_function` and `mask`, or this module's own; what has attention of its
    own gets the mask alone."""
    attention_function, mask = attention_function or attend, mask or step_mask
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    attends_by_interface = model._can_set_attn_implementation()
    eager = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _additive_mask
    try:
        for config, _ in before:
            config._attn_implementation_internal = IMPLEMENTATION if attends_by_interface else "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = eager
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            functions._global_mapping.pop(IMPLEMENTATION, None)


def step_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    """Which cached token each new one attends to: bool [batch, 1, new, capacity], from transformers' own rule."""
    if not isinstance(q_offset, torch.Tensor):
        raise UnsupportedCacheError("it computes masks from lengths of its own")
    index = torch.arange(q_length, device=device)[None, None, :, None] + q_offset.reshape(-1, 1, 1, 1)
    keys = torch.arange(kv_length, device=device)[None, None, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask_function(zero, zero, index, keys)


def _additive_mask(*, dtype: torch.dtype, **arguments: Any) -> torch.Tensor:
    mask = step_mask(**arguments)
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a cache: ONNX's operator where TensorRT has it, and otherwise what it consists of."""
    if attention_mask is None:
        raise UnsupportedCacheError("it attends without a mask")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    fused = query.dtype != torch.float32 and query.shape[-1] in FUSED_HEAD_SIZES and query.shape[-1] == value.shape[-1]
    if softcap is None and s_aux is None and fused:
        result = attention(query, key, value, attention_mask, scale)
    else:
        result = spelled_out(query, key, value, attention_mask, scale, softcap, s_aux)
    return result.transpose(1, 2).contiguous(), None


def spelled_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    kv_heads, capacity = key.shape[1:3]
    # Queries that share keys and values stand in one matrix.
    grouped = (query * scale).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    scores = (grouped @ key.transpose(2, 3)).reshape(batch, heads, tokens, capacity).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = torch.where(mask, scores, torch.finfo(query.dtype).min)
    if sinks is not None:
        # A logit per head that takes its share of the softmax and has no value.
        column = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    weights = weights.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * tokens, capacity)
    return (weights @ value).reshape(batch, heads, tokens, value.shape[-1])
