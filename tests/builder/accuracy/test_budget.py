"""Budgets are read strictly, and their metrics are what other libraries compute."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from trt_nvfp4.builder.accuracy.budget import METRICS, Budget, Score
from trt_nvfp4.builder.errors import BuilderError, UsageError


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [
        ("cosine>=0.999", "cosine", 0.999),
        (" sqnr >= 30.5dB ", "sqnr", 30.5),
        ("sqnr>=-3", "sqnr", -3.0),
        ("kl<=1e-3", "kl", 1e-3),
        ("perplexity<=16.5", "perplexity", 16.5),
    ],
)
def test_reads(text: str, metric: str, limit: float) -> None:
    assert Budget.parse(text) == Budget(metric, limit)


@pytest.mark.parametrize(
    "text", ["cosine>=0.9999999", "cosine>=0.999", "cosine>=1", "sqnr>=30", "sqnr>=-3.25", "perplexity<=123456.75"]
)
def test_is_shown_as_given(text: str) -> None:
    assert str(Budget.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one of cosine>=X"),
        ("0.999", "expected one of cosine>=X"),
        ("cosine", "expected one of cosine>=X"),
        ("cosine>0.999", "expected one of cosine>=X"),
        ("accuracy>=0.9", "expected one of cosine>=X"),
        ("cosine>=0.9 kl<=1", "expected one of cosine>=X"),
        ("cosine<=0.999", "is cosine>=X"),
        ("kl>=0.1", "is kl<=X"),
        ("cosine>=high", "'high' is not a number"),
        ("cosine>=1.5", "between 0 and 1"),
        ("cosine>=nan", "between 0 and 1"),
        ("kl<=-1", "between 0 and inf"),
        ("perplexity<=0.5", "between 1 and inf"),
        ("sqnr>=inf", "between -inf and inf"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="--accuracy-budget") as caught:
        Budget.parse(text)
    assert says in str(caught.value)


def test_scores_against_torch(rng: np.random.Generator) -> None:
    samples = []
    for length in (7, 12):
        logits = rng.standard_normal((2, length, 9)).astype(np.float32)
        noisy = logits + 0.1 * rng.standard_normal(logits.shape).astype(np.float32)
        mask = np.ones((2, length), np.int64)
        mask[1, -3:] = 0
        ids = rng.integers(0, 9, (2, length))
        samples.append(({"input_ids": ids, "attention_mask": mask}, logits, noisy))
    scores = {metric: Score(metric) for metric in METRICS}
    for sample, logits, noisy in samples:
        for score in scores.values():
            score.add(sample, {"logits": logits}, {"logits": noisy})

    pairs = [(torch.from_numpy(x).double(), torch.from_numpy(y).double()) for _, x, y in samples]
    cosine = min(torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item() for x, y in pairs)
    assert scores["cosine"].value == pytest.approx(cosine)
    assert scores["cosine"].loss == pytest.approx(1 - cosine)
    noise = sum((x - y).square().sum() for x, y in pairs) / sum(x.square().sum() for x, _ in pairs)
    assert scores["sqnr"].value == pytest.approx(-10 * math.log10(noise))
    assert scores["sqnr"].loss == pytest.approx(noise.item())
    kl = max(
        torch.nn.functional.kl_div(
            y.log_softmax(-1).flatten(0, 1), x.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
        ).item()
        for x, y in pairs
    )
    assert scores["kl"].value == scores["kl"].loss == pytest.approx(kl)
    nll, tokens = 0.0, 0
    for (sample, _, _), (_, y) in zip(samples, pairs, strict=True):
        target = torch.from_numpy(np.where(sample["attention_mask"] != 0, sample["input_ids"], -100))
        nll += torch.nn.functional.cross_entropy(
            y[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction="sum"
        ).item()
        tokens += int((target[:, 1:] >= 0).sum())
    assert scores["perplexity"].value == pytest.approx(math.exp(nll / tokens))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_what_is_equal_meets_every_budget(scale: float, rng: np.random.Generator) -> None:
    for size in range(2, 200):
        x = (scale * rng.standard_normal((1, size))).astype(np.float32)
        for text in ("cosine>=1", "sqnr>=1000", "kl<=0"):
            budget = Budget.parse(text)
            score = Score(budget.metric)
            score.add({}, {"y": x}, {"y": x.copy()})
            assert budget.met_by(score.value), (text, size)


@pytest.mark.parametrize("metric", ["kl", "perplexity"])
@pytest.mark.parametrize("ids", [np.ones((1, 4), np.int64), np.ones((1, 4), bool), np.ones((4, 1), np.float32)])
def test_kl_of_what_is_no_logits_is_refused(metric: str, ids: np.ndarray) -> None:
    with pytest.raises(UsageError, match=rf"needs logits; output ids is {ids.dtype}"):
        Score(metric).add({}, {"ids": ids}, {"ids": ids})


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_meets_nothing(broken: float, rng: np.random.Generator) -> None:
    """As of what overflows float16 in the quantized model."""
    x = rng.standard_normal((1, 4, 8)).astype(np.float16)
    y = x.copy()
    y[0, 0, 0] = broken
    sample = {"input_ids": np.ones((1, 4), np.int64)}
    for text in ("cosine>=0", "sqnr>=-1e300", "kl<=1e300", "perplexity<=1e300"):
        budget = Budget.parse(text)
        score = Score(budget.metric)
        score.add(sample, {"y": x}, {"y": y})
        assert not budget.met_by(score.value), text


def test_perplexity_beyond_all_numbers() -> None:
    logits = np.array([[[0.0, 5000.0], [0.0, 0.0]]], np.float32)
    score = Score("perplexity")
    score.add({"input_ids": np.zeros((1, 2), np.int64)}, {"y": logits}, {"y": logits})
    assert score.value == math.inf


def test_masked_logits_and_empty_outputs_add_nothing_to_kl(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    y = x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    plain, masked = Score("kl"), Score("kl")
    plain.add({}, {"y": x}, {"y": y})
    hidden = np.full((2, 3, 2), -np.inf, np.float32)
    empty = np.zeros((2, 0, 8), np.float32)
    masked.add(
        {}, {"y": np.concatenate([x, hidden], -1), "z": empty}, {"y": np.concatenate([y, hidden], -1), "z": empty}
    )
    assert masked.value == pytest.approx(plain.value)
    lost = Score("kl")
    lost.add({}, {"y": x}, {"y": np.where(x == x.max(), -np.inf, y)})
    assert lost.value == math.inf


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("cosine>=0.9999999", 0.99999985, "0.99999985"),
        ("cosine>=0.999", 0.99912345678, "0.999123"),
        ("sqnr>=30", 29.99999999, "29.99999999"),
        ("kl<=0.001", 0.0010000001, "0.0010000001"),
        ("kl<=0.001", 0.0009999999, "0.001"),
        ("cosine>=0.9", math.nan, "nan"),
        ("sqnr>=30", math.inf, "inf"),
    ],
)
def test_a_value_is_shown_on_its_side_of_the_limit(text: str, value: float, shown: str) -> None:
    assert Budget.parse(text).shown(value) == shown


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_mask": np.ones((2, 1, 5, 5))}, "must have the shape of input_ids"),
        ({"attention_mask": np.ones((2, 9))}, "must have the shape of input_ids"),
        ({"input_ids": np.full((2, 5), 8)}, "input_ids from 0 to 7.*found 8 to 8"),
        ({"input_ids": np.full((2, 5), -100)}, "input_ids from 0 to 7"),
    ],
)
def test_tokens_that_perplexity_cannot_count(
    change: dict[str, np.ndarray], says: str, rng: np.random.Generator
) -> None:
    logits = rng.standard_normal((2, 5, 8)).astype(np.float32)
    with pytest.raises(UsageError, match=says):
        Score("perplexity").add({"input_ids": np.ones((2, 5), np.int64), **change}, {"y": logits}, {"y": logits})


@pytest.mark.parametrize(
    ("expected", "actual", "says"),
    [
        (np.ones((3, 89)), np.ones((3, 92)), r"shape of output y depends on values: \(3, 89\) .* \(3, 92\)"),
        (np.array(["a"]), np.array(["a"]), "needs tensors of numbers; output y is not one"),
        (np.array(["a"], object), np.array(["a"], object), "needs tensors of numbers"),
        ([np.ones(3)], [np.ones(3)], "needs tensors of numbers"),
    ],
)
@pytest.mark.parametrize("metric", ["cosine", "kl"])
def test_outputs_that_no_budget_is_about(expected: Any, actual: Any, says: str, metric: str) -> None:
    with pytest.raises(UsageError, match=says):
        Score(metric).add({}, {"y": expected}, {"y": actual})


def test_perplexity_of_a_model_that_is_none(rng: np.random.Generator) -> None:
    y = rng.standard_normal((2, 8)).astype(np.float32)
    with pytest.raises(BuilderError, match="needs a language model"):
        Score("perplexity").add({"x": y}, {"y": y}, {"y": y})


@pytest.mark.parametrize("ids", [np.arange(8).reshape(1, 8), np.arange(8).reshape(1, 8) > 3])
@pytest.mark.parametrize("metric", METRICS)
def test_integers_and_booleans_are_left_out(metric: str, ids: np.ndarray, rng: np.random.Generator) -> None:
    """Small errors exchange the indices of nearly equal scores, which says nothing of how good the scores are."""
    sample = {"input_ids": rng.integers(0, 9, (2, 4))}
    x = rng.standard_normal((2, 4, 9)).astype(np.float32)
    y = x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    alone, beside = Score(metric), Score(metric)
    alone.add(sample, {"y": x}, {"y": y})
    beside.add(sample, {"ids": ids, "y": x}, {"ids": ids[:, ::-1], "y": y})
    assert (beside.value, beside.loss) == (alone.value, alone.loss)
    assert (beside.left_out, alone.left_out) == ({"ids"}, set())


@pytest.mark.parametrize("metric", ["cosine", "sqnr"])
def test_a_budget_of_integers_alone_is_refused(metric: str) -> None:
    ids = np.ones((1, 4), np.int64)
    says = rf"{metric} needs an output of floating-point .*output a is int64 \(1, 4\), output b is bool \(1, 4\)"
    with pytest.raises(UsageError, match=says):
        Score(metric).add({}, {}, {"a": ids, "b": ids > 0})


@pytest.mark.parametrize("metric", ["cosine", "sqnr", "kl"])
def test_the_worst_output_is_named(metric: str, rng: np.random.Generator) -> None:
    expected = {name: rng.standard_normal((2, 4, 9)) for name in "abc"}
    noise = {"a": 0.1, "b": 0.5, "c": 0.0}
    actual = {name: x + noise[name] * rng.standard_normal(x.shape) for name, x in expected.items()}
    score, same, broken = Score(metric), Score(metric), Score(metric)
    score.add({}, expected, actual)
    assert score.worst_output == "b"
    same.add({}, expected, expected)
    assert same.worst_output == ""
    broken.add({}, expected, {**actual, "c": actual["c"] * math.nan})
    assert broken.worst_output == "c"
