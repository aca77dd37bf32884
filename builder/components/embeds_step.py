"""One step of a decoder over caches that takes embeddings in place of token ids: the half of a vision-language model
that speaks.

Its contract is `decoder_contract`'s with `inputs_embeds [batch, new, hidden]`, and as the family needs them
`position_ids [3, batch, new]` (rotary embeddings in three directions), `groups [batch, new]` (tokens of one group, 0 or
above, see each other in both directions; -1: causal) and `deepstack.{n} [batch, new, hidden]`, which is added behind
layer n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trt_nvfp4.builder.export.decoder_caches import StepCache
from trt_nvfp4.builder.export.decoder_rope import without_branches
from trt_nvfp4.builder.export.decoder_step import cached_attention, layer_count, of_last_tokens, step_mask

EMBEDS, POSITIONS, GROUPS = "inputs_embeds", "position_ids", "groups"


class EmbedsStep(torch.nn.Module):
    """(inputs_embeds, past_length, new_length, [position_ids], [groups], *deepstack, *caches) -> (logits, *caches)."""

    def __init__(
        self, model: Any, capacity: int, *, mrope: bool, grouped: bool, deepstack: int, first_position: int
    ) -> None:
        """`deepstack`: how many layers have features added; `first_position` is the number of the first token."""
        super().__init__()
        self.model, self.capacity, self.mrope, self.grouped, self.deepstack = model, capacity, mrope, grouped, deepstack
        self.first_position = first_position
        self.numbers: list[int] = []

    def probe(self, hidden: int) -> list[torch.Tensor]:
        """Empty caches for a batch of one, as the model's layers ask for them."""
        dtype = self.model.get_input_embeddings().weight.dtype
        embeds, length = torch.zeros((1, 2, hidden), dtype=dtype), torch.zeros(1, dtype=torch.int64)
        extra = [torch.zeros((3, 1, 2), dtype=torch.int64)] * self.mrope + [length[:, None].expand(1, 2)] * self.grouped
        extra += [torch.zeros_like(embeds)] * self.deepstack
        cache = StepCache(length, self.capacity, layer_count(self.model), (), ())
        self._run(embeds, length, length + 2, extra, cache)
        self.numbers = cache.appended
        return [torch.zeros_like(tensor) for tensor in cache.tensors(self.numbers)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        embeds, past_length, new_length, *rest = tensors
        count = self.mrope + self.grouped + self.deepstack
        cache = StepCache(past_length, self.capacity, layer_count(self.model), self.numbers, rest[count:])
        logits = self._run(embeds, past_length, new_length, rest[:count], cache)
        return (logits, *cache.tensors(self.numbers))

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
        with ExitStack() as within:
            within.enter_context(cached_attention(self.model, mask=_mask(groups, past_length, self.capacity)))
            within.enter_context(without_branches(self.model, self.capacity))
            within.enter_context(of_last_tokens(self.model, new_length))
            within.enter_context(_added_features(self.model, given))
            found = self.model(inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = found.logits
        return logits


def _mask(groups: torch.Tensor | None, past_length: torch.Tensor, capacity: int) -> Callable[..., torch.Tensor]:
    """transformers' own rule, and beyond it tokens of one group, which see each other: those that follow, and those
    that a sliding window has left behind."""
    if groups is None:
        return step_mask
    index = past_length[:, None] + torch.arange(groups.shape[1], device=groups.device)
    everywhere = groups.new_full((groups.shape[0], capacity), -1)
    of_keys = everywhere.scatter(1, index, groups)[:, None, None]
    together = (of_keys == groups[:, None, :, None]) & (of_keys >= 0)

    def mask(**arguments: Any) -> torch.Tensor:
        return step_mask(**arguments) | together

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
