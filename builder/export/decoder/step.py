"""One step of a Hugging Face language model over caches of fixed capacity, as a Torch module that torch.onnx exports.

transformers' own modeling code runs; it is given a cache whose `update` appends at a position per sequence, a mask
that is computed from positions, and an attention function of operators that ONNX has.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trt_nvfp4.builder.export.decoder.caches import Slot, StepCache, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder.ops import attention, last_tokens
from trt_nvfp4.builder.export.decoder.rope import without_branches
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates, recorded
from trt_nvfp4.builder.export.recurrent.layers import over_states
from trt_nvfp4.builder.model.decoder_contract import IDS, LOGIT_TOKENS, PREVIOUS_HIDDEN

#: Under this name transformers finds the attention and the mask of this module.
IMPLEMENTATION = "trt_nvfp4_cached"
#: Head sizes that TensorRT's fused attention has, in 16 bits.
FUSED_HEAD_SIZES = range(16, 257, 8)


@dataclass(frozen=True)
class Way:
    """How a model's code is run over caches.

    `masked`: it is given a mask that holds for the whole capacity, for code that counts tokens by it. `counts`: caches
    say how many tokens they hold, a number per sequence. `own`: the attention that code of its own computes.
    `single`: there is one sequence, for code that has one number of cached tokens for a whole batch.
    """

    masked: bool = False
    counts: bool = True
    own: Literal["eager", "sdpa"] = "eager"
    single: bool = False


#: In the order in which they are tried.
WAYS = (Way(), Way(masked=True), Way(counts=False), Way(masked=True, own="sdpa"), Way(single=True))


class Step(torch.nn.Module):
    """(input_ids, past_length, new_length, [previous_hidden_states], *caches) -> (logits, [hidden_states], *caches).

    `slots` are the tensors of layers that have caches or states of their own; `probe` finds them.
    """

    def __init__(
        self, model: Any, capacity: int, all_logits: bool, way: Way = WAYS[0], hidden: HiddenStates | None = None
    ) -> None:
        """`hidden` makes the hidden states that come out. A model that is a head takes hidden states, too."""
        super().__init__()
        self.hidden = hidden
        self._given = (IDS, PREVIOUS_HIDDEN) if isinstance(model, Head) else (IDS,)
        self.model, self.capacity, self.all_logits, self.way = model, capacity, all_logits, way
        self.slots: list[Slot] = []
        self.outputs: tuple[str, ...] = ()
        self._layers = layer_count(model)
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes_positions = "position_ids" in parameters or open_ended
        # Models without attention call it otherwise.
        self._cache_name = next((name for name in ("past_key_values", "cache_params") if name in parameters), None)

    def probe(self) -> list[torch.Tensor]:
        """Empty caches for a batch of one, as the model's layers ask for them."""
        ids, length = torch.ones((1, 2), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        cache = StepCache(length, self.capacity, self._layers, (), (), self.way.counts, length + 2)
        self._run([ids, *self.previous(ids)], length, length + 2, cache)
        self.slots = cache.slots
        return [torch.zeros_like(tensor) for tensor in cache.tensors(self.slots)]

    def previous(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states that a head takes with these tokens, random; none for other models."""
        if PREVIOUS_HIDDEN not in self._given:
            return []
        assert self.hidden is not None
        return [torch.randn((*ids.shape, self.hidden.width), dtype=self.model.get_output_embeddings().weight.dtype)]

    def named(self, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tokens, and what a head takes with them, as the model's arguments."""
        return dict(zip(self._given, given, strict=True))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, past_length, new_length, *rest = tensors
        given, caches = [ids, *rest[: len(self._given) - 1]], rest[len(self._given) - 1 :]
        cache = StepCache(past_length, self.capacity, self._layers, self.slots, caches, self.way.counts, new_length)
        # A sequence that only keeps its states has no new token, and its last one does not count.
        valid = new_length.clamp(min=1) if any(slot.is_state for slot in self.slots) else new_length
        return *self._run(given, past_length, valid, cache), *cache.tensors(self.slots)

    def _run(
        self, given: Sequence[torch.Tensor], past_length: torch.Tensor, new_length: torch.Tensor, cache: StepCache
    ) -> tuple[torch.Tensor, ...]:
        # Padding repeats the last valid position: tables of positions have no row beyond the capacity, and rotary
        # embeddings that depend on the longest sequence see the true one.
        index = torch.arange(given[0].shape[1], device=given[0].device)[None]
        positions = past_length[:, None] + torch.minimum(index, new_length[:, None] - 1)
        extra: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if self.way.masked:
            extra["attention_mask"] = torch.ones_like(positions[:, :1]).expand(-1, self.capacity)
        with (
            recorded(self.hidden) as found,
            cached_attention(self.model, own=self.way.own),
            without_branches(self.model, self.capacity),
            of_last_tokens(None if self.all_logits else self.model, new_length),
            over_states(self.model, cache),
        ):
            extra[self._cache_name or "past_key_values"] = cache
            logits = self.model(use_cache=True, **self.named(given), **extra).logits
        return logits, *found()


def layer_count(model: Any) -> int:
    numbers = [getattr(part, "layer_idx", None) for part in model.modules()]
    stated = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return max([stated, *(number + 1 for number in numbers if isinstance(number, int))])


@contextmanager
def of_last_tokens(model: Any, new_length: torch.Tensor) -> Iterator[None]:
    """Within, the model's head sees each sequence's last LOGIT_TOKENS valid tokens; None leaves it all tokens."""
    if model is None:
        yield
        return

    def last(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return last_tokens(hidden, new_length, LOGIT_TOKENS), *others

    hook = model.get_output_embeddings().register_forward_pre_hook(last)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def cached_attention(
    model: Any,
    attention_function: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    own: Literal["eager", "sdpa"] = "eager",
) -> Iterator[None]:
    """Within, the model attends by `attention_function` and `mask`, or this module's own; code with attention of
    its own gets only the mask, and computes the attention that it calls `own`."""
    attention_function, mask = attention_function or attend, mask or step_mask
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    attends_by_interface = model._can_set_attn_implementation()
    own_mask, torchs = ALL_MASK_ATTENTION_FUNCTIONS[own], torch.nn.functional.scaled_dot_product_attention
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)
    ALL_MASK_ATTENTION_FUNCTIONS[own] = _additive_mask
    if own == "sdpa":
        torch.nn.functional.scaled_dot_product_attention = _biased  # type: ignore[assignment]
    try:
        for config, _ in before:
            config._attn_implementation_internal = IMPLEMENTATION if attends_by_interface else own
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        ALL_MASK_ATTENTION_FUNCTIONS[own] = own_mask
        torch.nn.functional.scaled_dot_product_attention = torchs
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
    # Masks that do not begin at the new tokens, such as those of an encoder that is not there, begin at a number.
    offset = q_offset.reshape(-1, 1, 1, 1) if isinstance(q_offset, torch.Tensor) else q_offset
    index = torch.arange(q_length, device=device)[None, None, :, None] + offset
    keys = torch.arange(kv_length, device=device)[None, None, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask_function(zero, zero, index, keys)


def _additive_mask(*, dtype: torch.dtype, **arguments: Any) -> torch.Tensor:
    mask = step_mask(**arguments)
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def _biased(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with a mask that is added (ALiBi), of what it consists of."""
    if attn_mask is None:
        raise UnsupportedCacheError("it attends without a mask")
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    return torch.softmax((scores + attn_mask).float(), -1).to(value.dtype) @ value


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a cache: ONNX's operator where TensorRT has it, and otherwise what it consists of. `indices`
    [batch, new, chosen]: the cached tokens that each new one may attend to; None where it may to all."""
    if attention_mask is None:
        raise UnsupportedCacheError("it attends without a mask")
    if indices is not None:
        # TensorRT scatters numbers.
        nothing = torch.zeros_like(attention_mask[:, 0], dtype=torch.float32)
        attention_mask = attention_mask & (nothing.scatter(2, indices.long(), 1.0) > 0)[:, None]
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    fused = query.dtype != torch.float32 and query.shape[-1] in FUSED_HEAD_SIZES and query.shape[-1] == value.shape[-1]
    if softcap is None and s_aux is None and fused and attention_mask.dtype == torch.bool:
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
    # Code that computes masks of its own from this module's adds them to scores.
    scores = torch.where(mask, scores, torch.finfo(query.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        # A logit per head that takes its share of the softmax and has no value.
        column = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    weights = weights.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * tokens, capacity)
    return (weights @ value).reshape(batch, heads, tokens, value.shape[-1])
