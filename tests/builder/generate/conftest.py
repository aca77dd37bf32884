"""Tiny decoders and prompts for them."""

from collections.abc import Callable

import numpy as np
import pytest

from onnx_models.tiny_decoder import VOCAB, TinyDecoder


@pytest.fixture
def tiny(rng: np.random.Generator) -> TinyDecoder:
    return TinyDecoder(rng)


@pytest.fixture
def tiny_of(rng: np.random.Generator) -> Callable[..., TinyDecoder]:
    """Makes others: (capacity=, max_batch=) -> decoder."""
    return lambda **options: TinyDecoder(rng, **options)


@pytest.fixture
def ragged(rng: np.random.Generator) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [rng.integers(0, VOCAB, length).tolist() for length in (9, 1, 4)]
