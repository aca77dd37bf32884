"""A decoder's samples in two halves: what the second computes over the caches of the first is what the whole does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_models.tiny_decoder import HEAD_DIM, KV_HEADS, VOCAB, TinyDecoder
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.calibration.samples.filled_caches import Continuation, halves, run, with_filled_caches
from trt_nvfp4.calibration.statistics.statistics import collect

LENGTHS = (9, 2, 10)


@pytest.fixture
def tiny(seed: int) -> TinyDecoder:
    return TinyDecoder(np.random.default_rng(seed))


@pytest.fixture
def model(tiny: TinyDecoder, tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "tiny.onnx")


@pytest.fixture
def samples(tiny: TinyDecoder, seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed + 1)
    caches = dict.fromkeys(tiny.decoder.caches, np.zeros((1, KV_HEADS, tiny.decoder.capacity, HEAD_DIM), np.float32))
    texts = [rng.integers(0, VOCAB, (1, length)) for length in LENGTHS]
    return [
        {"input_ids": text, "past_length": np.array([0]), "new_length": np.array([text.shape[1]]), **caches}
        for text in texts
    ]


def test_the_second_half_continues_behind_the_first(tiny: TinyDecoder, model: Path, samples: Any) -> None:
    runner = session(model)
    for sample in samples:
        first, rest = halves(sample)
        assert isinstance(rest, Continuation)
        assert first["input_ids"].shape[1] + rest["input_ids"].shape[1] == sample["input_ids"].shape[1]
        text = sample["input_ids"][0].tolist()
        expected = tiny.logits(text)
        for half, end in ((first, first["input_ids"].shape[1]), (rest, len(text))):
            (logits,) = run(runner, half, ["logits"])
            np.testing.assert_allclose(logits[0, -1], expected[end - 1], rtol=1e-4, atol=1e-4)


def test_statistics_over_filled_caches_are_those_of_whole_texts(model: Path, samples: Any) -> None:
    tensors = {"x": ("mean_square", "hessian"), "a2": ("amax",), "present.0.key": ("head_amax",)}
    whole, filled = collect(model, tensors, samples), collect(model, tensors, with_filled_caches(samples))
    for name in tensors:
        np.testing.assert_allclose(filled.amax[name], whole.amax[name], rtol=1e-5)
    for kind, name in (("mean_square", "x"), ("hessian", "x"), ("head_amax", "present.0.key")):
        found, expected = (getattr(statistics.of(name), kind) for statistics in (filled, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_no_text_over_empty_caches_passes_as_it_is(samples: Any) -> None:
    sample = samples[0]
    caches = {name: array for name, array in sample.items() if name.startswith("past_key_values.")}
    others: list[dict[str, np.ndarray]] = [
        {"input_ids": sample["input_ids"]},
        {**sample, "new_length": np.array([1])},
        {**sample, "past_length": np.array([3])},
        {name: np.concatenate([array, array]) for name, array in sample.items()},
        {"inputs_embeds": np.ones((1, 4, 8), np.float32), **caches},
    ]
    for other in others:
        assert halves(other) == [other]
    assert len(with_filled_caches(samples)) == len(list(with_filled_caches(samples))) == 6  # type: ignore[arg-type]
    assert len(list(with_filled_caches(iter(samples)))) == 6
