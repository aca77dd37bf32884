"""A model's recurrent layers over the states of a step."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from trt_nvfp4.builder.export.decoder.caches import StepCache
from trt_nvfp4.builder.export.recurrent.functions import FUNCTIONS, causal_conv, diagonal, recurrence

_ABSENT = object()


@contextmanager
def over_states(model: Any, cache: StepCache) -> Iterator[None]:
    """Within, what the model's layers compute over states of their own goes over those of `cache`."""
    modules = {type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as within:
        for name, module in modules.items():
            for function, stand_in in FUNCTIONS.items():
                if hasattr(module, function):
                    within.enter_context(_replaced(module, function, stand_in(cache)))
            for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
                if issubclass(kind, Cache) and kind.__module__ == name:
                    # Its code accepts only its own.
                    within.enter_context(_replaced(module, kind.__name__, StepCache))
        for name, part in model.named_modules():
            for has, enter in _LAYERS:
                if all(hasattr(part, attribute) for attribute in has):
                    numbers = [int(entry) for entry in name.split(".") if entry.isdecimal()]
                    enter(part, numbers[-1] if numbers else 0, cache, within)
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _lightning(part: Any, layer: int, cache: StepCache, within: ExitStack) -> None:
    """Linear attention whose decay is a constant per head."""

    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        cache.enter(part.layer_idx)
        heads, dim = part.num_attention_heads, part.head_dim
        mixed = part.act_fn(part.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * dim))
        query, key, value = mixed[..., :dim], mixed[..., dim : 2 * dim], mixed[..., 2 * dim :]
        ones = torch.ones_like(mixed[..., 0], dtype=torch.float32)
        decay = cache.unpadded(-part.slope_rate.float().flatten() * ones)
        output = recurrence(cache, mixed.dtype, query, cache.unpadded(key), value, decay, None, 1.0)[0]
        output = part.norm(output.flatten(2).to(hidden_states.dtype))
        return part.out_proj(torch.sigmoid(part.output_gate(hidden_states)) * output), None

    within.enter_context(_replaced(part, "forward", forward))


def _gated_recurrent_unit(part: Any, layer: int, cache: StepCache, within: ExitStack) -> None:
    """A block of a convolution and a diagonal recurrence, which keeps its states in itself."""
    forward, unit = part.forward, part.rg_lru

    def without_own(*args: Any, use_cache: bool = False, **kwargs: Any) -> Any:
        cache.enter(layer)
        return forward(*args[:3], use_cache=False, **kwargs)

    def convolution(inputs: torch.Tensor) -> torch.Tensor:
        return causal_conv(cache)(inputs, part.conv_1d.weight[:, 0], part.conv_1d.bias)

    def scan(hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return diagonal(cache, hidden_states, recurrent_gate).to(hidden_states.dtype), None

    within.enter_context(_replaced(part, "forward", without_own))
    within.enter_context(_replaced(part.conv_1d, "forward", convolution))
    within.enter_context(_replaced(unit, "_rnn_scan", scan))


#: Layers that compute without a function of their own: what they hold, and what makes theirs.
_LAYERS: tuple[tuple[tuple[str, ...], Callable[[Any, int, StepCache, ExitStack], None]], ...] = (
    (("slope_rate", "qkv_proj", "output_gate", "out_proj"), _lightning),
    (("rg_lru", "conv_1d"), _gated_recurrent_unit),
)
