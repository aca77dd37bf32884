"""One step of a decoder over caches that takes embeddings in place of token ids: the half of a vision-language model
that speaks.

Its contract is `decoder_contract`'s with `inputs_embeds [batch, new, hidden]`, and as the family needs them
`position_ids [3, batch, new]` (rotary embeddings in three directions), `groups [batch, new]` (tokens of one group, 0 or
above, see each other in both directions; -1: causal), `deepstack.{n} [batch, new, hidden]`, which is added behind layer
n, and `per_layer_inputs [batch, new, layers * width]`, what each layer gets of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trt_nvfp4.builder.export.decoder.caches import Slot, StepCache
from trt_nvfp4.builder.export.decoder.rope import without_branches
from trt_nvfp4.builder.export.decoder.step import cached_attention, layer_count, of_last_tokens, step_mask

EMBEDS, POSITIONS, GROUPS, PER_LAYER = "inputs_embeds", "position_ids", "groups", "per_layer_inputs"
# Farther than any attention window.
_FAR = 1 << 40


class EmbedsStep(torch.nn.Module):
    """(inputs_embeds, past_length, new_length, [position_ids], [groups], *deepstack, [per_layer_inputs], *caches) ->
    (logits, *caches)."""

    def __init__(
        self,
        model: Any,
        capacity: int,
        *,
        mrope: bool,
        grouped: bool,
        only_local: bool,
        deepstack: int,
        per_layer: int,
        first_position: int,
    ) -> None:
        """`only_local`: groups count only in layers with a window; `deepstack`: how many layers have features added;
        `per_layer`: the size of what all layers get of a token, 0 for nothing; `first_position`: of the first token."""
        super().__init__()
        self.model, self.capacity, self.mrope, self.grouped, self.deepstack = model, capacity, mrope, grouped, deepstack
        self.only_local, self.per_layer, self.first_position = only_local, per_layer, first_position
        self.slots: list[Slot] = []

    def probe(self, hidden: int) -> list[torch.Tensor]:
        """Empty caches for a batch of one, as the model's layers ask for them."""
        dtype = self.model.get_input_embeddings().weight.dtype
        embeds, length = torch.zeros((1, 2, hidden), dtype=dtype), torch.zeros(1, dtype=torch.int64)
        extra = [torch.zeros((3, 1, 2), dtype=torch.int64)] * self.mrope + [length[:, None].expand(1, 2)] * self.grouped
        extra += [torch.zeros_like(embeds)] * self.deepstack
        extra += [embeds.new_zeros((1, 2, self.per_layer))] * (self.per_layer > 0)
        cache = StepCache(length, self.capacity, layer_count(self.model), (), ())
        self._run(embeds, length, length + 2, extra, cache)
        self.slots = cache.slots
        return [torch.zeros_like(tensor) for tensor in cache.tensors(self.slots)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        embeds, past_length, new_length, *rest = tensors
        count = self.mrope + self.grouped + self.deepstack + (self.per_layer > 0)
        cache = StepCache(past_length, self.capacity, layer_count(self.model), self.slots, rest[count:])
        logits = self._run(embeds, past_length, new_length, rest[:count], cache)
        return (logits, *cache.tensors(self.slots))

    def _run(
        self,
        embeds: torch.Tensor,
        past_length: torch.Tensor,
        new_length: torch.Tensor,
        extra: Sequence[torch.Tensor],
        cache: StepCache,
    ) -> torch.Tensor:
        given = list(extra)
        if self.mrope:
            positions = given.pop(0)
        else:
            # Padding repeats the last valid position, which tables have a row for.
            index = torch.arange(embeds.shape[1], device=embeds.device)[None]
            positions = past_length[:, None] + torch.minimum(index, new_length[:, None] - 1) + self.first_position
        groups = given.pop(0) if self.grouped else None
        further: dict[str, Any] = {}
        if self.per_layer:
            layers = layer_count(self.model)
            each = (*embeds.shape[:2], layers, self.per_layer // layers)
            further["per_layer_inputs"] = given.pop().reshape(each)
        mask = _mask(groups, past_length, self.capacity, self.only_local)
        with ExitStack() as within:
            within.enter_context(cached_attention(self.model, mask=mask))
            within.enter_context(without_branches(self.model, self.capacity))
            within.enter_context(of_last_tokens(self.model, new_length))
            within.enter_context(_added_features(self.model, given))
            found = self.model(
                inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True, **further
            )
        logits: torch.Tensor = found.logits
        return logits


def _mask(
    groups: torch.Tensor | None, past_length: torch.Tensor, capacity: int, only_local: bool
) -> Callable[..., torch.Tensor]:
    """transformers' own rule, and beyond it tokens of one group, which see each other: those that follow, and those
    that a sliding window has left behind. `only_local`: the former, in layers with a window."""
    if groups is None:
        return step_mask
    index = past_length[:, None] + torch.arange(groups.shape[1], device=groups.device)
    everywhere = groups.new_full((groups.shape[0], capacity), -1)
    of_keys = everywhere.scatter(1, index, groups)[:, None, None]
    together = (of_keys == groups[:, None, :, None]) & (of_keys >= 0)
    ahead = torch.arange(capacity, device=groups.device)[None, None, None] > index[:, None, :, None]

    def mask(**arguments: Any) -> torch.Tensor:
        causal = step_mask(**arguments)
        if not only_local:
            return causal | together
        zero = torch.zeros((), dtype=torch.int64, device=causal.device)
        sees_far: torch.Tensor = arguments["mask_function"](zero, zero, zero + _FAR, zero)
        return causal | (together & ahead & ~sees_far)

    return mask


@contextmanager
def _added_features(model: Any, features: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, the first layers of the language model have features added to what they give out."""
    layers = model.model.language_model.layers if features else ()
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output, addend=addend: output + addend)
        for layer, addend in zip(layers, features, strict=False)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
