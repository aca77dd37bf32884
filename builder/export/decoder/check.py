"""Compares a step over caches with the model without a cache."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from trt_nvfp4.builder.export.decoder.rope import switch_length
from trt_nvfp4.builder.export.decoder.step import Step
from trt_nvfp4.builder.export.draft_heads.head import with_hidden_states

#: Largest error of logits relative to their norm: rounding, and nothing else.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_16_BITS = 5e-2
# In 16 bits, as many times the difference between the model's own ways to attend.
_ROUNDINGS = 3
_LONGEST = 32
# Tokens for models with states: beyond a chunk of 64, which code without a loop over tokens computes together.
_CHUNK = 70


def cache_error(model: Any, step: Step, empty: list[torch.Tensor]) -> str | None:
    """The error of the step's logits in words, on two prompts of different lengths and two tokens each; None if they
    fit.

    `empty` are caches for a batch of one. A model that computes positions, masks or states in ways of its own shows
    here, whatever it is.
    """
    least = _CHUNK if any(slot.is_state for slot in step.slots) else 0
    longest = max(_longest_prompt(model, step.capacity), min(least, step.capacity - 2))
    lengths = torch.tensor([longest, max(1, longest // 2)])
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (2, longest + 2), generator=torch.Generator().manual_seed(0))
    padding = model.config.get_text_config(decoder=True).pad_token_id
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        ids[0, -2] = padding  # its embedding is often zero
    given = [ids, *step.previous(ids)]
    expected = _without_cache(step, given)
    batches = [[0], [1]] if step.way.single else [[0, 1]]
    errors = [
        error
        for rows in batches
        for error in _errors(step, _of(given, rows), lengths[rows], _of(expected, rows), empty)
    ]
    # A mixture of experts in 16 bits may send a token elsewhere for a rounding error: the median forgives that.
    # Heads may give out float32 all the same.
    dtype, error = model.get_input_embeddings().weight.dtype, median(errors)
    if error <= TOLERANCE.get(dtype, TOLERANCE_16_BITS):
        return None
    if dtype != torch.float32 and error <= _ROUNDINGS * _own_rounding(step, given, expected[0]):
        return None
    return (
        f"its logits differ by {error:.1%} from those that it computes without a cache (masks, positions or states of "
        "its own)"
    )


def _of(tensors: Sequence[torch.Tensor], rows: list[int]) -> list[torch.Tensor]:
    return [tensor[rows] for tensor in tensors]


def _errors(
    step: Step,
    given: list[torch.Tensor],
    lengths: torch.Tensor,
    expected: list[torch.Tensor],
    empty: list[torch.Tensor],
) -> list[float]:
    """Relative errors of the logits, and hidden states, of prompts of `lengths` tokens and of two tokens behind each.
    `given` are the tokens, and what a head takes with them."""
    rows, other = torch.arange(len(lengths)), min(3, step.capacity)
    unused = [
        tensor.expand(len(rows), *tensor.shape[1:]) for tensor in empty
    ]  # without memory: a long capacity's are large
    caches, past, new = unused, torch.zeros_like(lengths), lengths
    ids, *previous = (tensor[:, : max(lengths)] for tensor in given)
    errors: list[float] = []
    for number in range(3):
        if number:
            new, (ids, *previous) = torch.ones_like(new), (tensor[rows, past][:, None] for tensor in given)
            # Another text in between, for states that the model keeps elsewhere.
            others, *beside = (tensor[:, -other:] for tensor in given)
            step(others, torch.zeros_like(past), torch.full_like(past, other), *beside, *unused)
        results = step(ids, past, new, *previous, *caches)
        found, caches = results[: len(expected)], list(results[len(expected) :])
        past = past + new
        last_logit = new - 1 if step.all_logits else torch.full_like(new, -1)
        for result, whole, at in zip(found, expected, (last_logit, new - 1), strict=False):
            last = whole[rows, past - 1].double()
            errors += ((result[rows, at].double() - last).norm(dim=-1) / last.norm(dim=-1)).tolist()
    return errors


def _longest_prompt(model: Any, capacity: int) -> int:
    """Beyond a short attention window, so that it shows, and within what one set of rotary frequencies serves."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or 0
    room = min(capacity, switch_length(model, capacity) or capacity) - 2
    return max(1, min(_LONGEST, max(6, window + 3), room))


def _own_rounding(step: Step, given: list[torch.Tensor], expected: torch.Tensor) -> float:
    """Relative difference between the logits of the model's own code with torch's attention and `expected`, those
    without; 0 where it has no such choice."""
    try:
        found = _without_cache(step, given, "sdpa")[0].double()
    except ValueError:  # transformers' for an attention that the model does not have
        return 0.0
    wrong = (found - expected).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(wrong.median())


def _without_cache(step: Step, given: list[torch.Tensor], attention: str = "eager") -> list[torch.Tensor]:
    """Logits, and hidden states, of the model's own code. Sequences run one by one: padding would need a mask."""
    model, before = step.model, step.model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        found = [
            with_hidden_states(model, step.hidden, use_cache=False, **step.named(_of(given, [row])))
            for row in range(len(given[0]))
        ]
    finally:
        model.set_attn_implementation(before)
    return [torch.cat(tensors) for tensors in zip(*found, strict=True)]
