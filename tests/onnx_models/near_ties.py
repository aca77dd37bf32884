"""Comparison of greedy texts, in which rounding decides between tokens that are equally likely."""

from typing import Any

import torch

# Of two tokens whose logits differ by this share of the largest, rounding decides.
TIE = 1e-3


def assert_same(model: Any, prompt: list[int], found: list[int], expected: list[int]) -> None:
    """The same tokens up to one that rounding decides, by transformers' own logits; what follows that may differ."""
    assert len(found) == len(expected)
    for place, (token, other) in enumerate(zip(found, expected, strict=True)):
        if token != other:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *expected[:place]]]), use_cache=False).logits[0, -1]
            assert logits[other] - logits[token] < TIE * logits.abs().max(), (place, found, expected)
            return
