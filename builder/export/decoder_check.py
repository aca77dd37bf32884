"""Whether a step over caches computes what the model computes without one."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from trt_nvfp4.builder.export.decoder_rope import switch_length
from trt_nvfp4.builder.export.decoder_step import Step

#: Largest error of logits relative to their norm: rounding, and nothing else.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_16_BITS = 5e-2
_LONGEST = 32


def cache_error(model: Any, step: Step, empty: list[torch.Tensor]) -> str | None:
    """What is wrong with the step's logits on two prompts of different lengths and two tokens each; None if nothing is.

    `empty` are caches for a batch of one. A model that computes positions, masks or states in ways of its own shows
    here, whatever it is.
    """
    longest = _longest_prompt(model, step.capacity)
    lengths = torch.tensor([longest, max(1, longest // 2)])
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (2, longest + 2), generator=torch.Generator().manual_seed(0))
    expected = _without_cache(model, ids)
    batches = [[0], [1]] if step.way.single else [[0, 1]]
    errors = [error for rows in batches for error in _errors(step, ids[rows], lengths[rows], expected[rows], empty)]
    # A mixture of experts in 16 bits may send a token elsewhere for a rounding error: the median forgives that.
    error, limit = median(errors), TOLERANCE.get(expected.dtype, TOLERANCE_16_BITS)
    if error <= limit:
        return None
    return (
        f"its logits differ by {error:.1%} from those that it computes without a cache (masks, positions or states of "
        "its own)"
    )


def _errors(
    step: Step, ids: torch.Tensor, lengths: torch.Tensor, expected: torch.Tensor, empty: list[torch.Tensor]
) -> list[float]:
    """Relative errors of the logits of prompts of `lengths` tokens and of two tokens behind each."""
    rows, other = torch.arange(len(ids)), min(3, step.capacity)
    unused = [tensor.expand(len(ids), -1, -1, -1) for tensor in empty]  # without memory: a long capacity's are large
    caches, past, new, window = unused, torch.zeros_like(lengths), lengths, ids[:, : max(lengths)]
    errors: list[float] = []
    for number in range(3):
        if number:
            new, window = torch.ones_like(new), ids.gather(1, past[:, None])
            # Another text in between, for states that the model keeps elsewhere.
            step(ids[:, -other:], torch.zeros_like(past), torch.full_like(past, other), *unused)
        logits, *caches = step(window, past, new, *caches)
        past = past + new
        last = expected[rows, past - 1].double()
        at = new - 1 if step.all_logits else torch.zeros_like(new)
        difference = logits[rows, at].double() - last
        errors += (difference.norm(dim=-1) / last.norm(dim=-1)).tolist()
    return errors


def _longest_prompt(model: Any, capacity: int) -> int:
    """Beyond a short attention window, so that it shows, and within what one set of rotary frequencies serves."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or 0
    room = min(capacity, switch_length(model, capacity) or capacity) - 2
    return max(1, min(_LONGEST, max(6, window + 3), room))


def _without_cache(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model's own code. Sequences run one by one: padding would need a mask."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits = [model(input_ids=sequence[None], use_cache=False).logits for sequence in ids]
    finally:
        model.set_attn_implementation(before)
    return torch.cat(logits)
