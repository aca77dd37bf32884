"""Budgets are read strictly, and their metrics are what other libraries compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_nvfp4.builder.accuracy_budget import METRICS, Budget, Score
from trt_nvfp4.builder.errors import USAGE, BuilderError


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
    with pytest.raises(BuilderError, match="--accuracy-budget") as caught:
        Budget.parse(text)
    assert caught.value.exit_code == USAGE
    assert says in str(caught.value)


@given(st.text(max_size=30))
def test_other_text_is_an_error_of_usage(text: str) -> None:
    code = USAGE
    try:
        Budget.parse(text)
    except BuilderError as error:
        code = error.exit_code
    assert code == USAGE


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


def test_nan_meets_nothing(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 4, 8)).astype(np.float32)
    y = x.copy()
    y[0, 0, 0] = np.nan
    for text in ("cosine>=0", "sqnr>=-100", "kl<=100"):
        budget = Budget.parse(text)
        score = Score(budget.metric)
        score.add({}, {"y": x}, {"y": y})
        assert not budget.met_by(score.value), text


def test_perplexity_of_a_model_that_is_none(rng: np.random.Generator) -> None:
    y = rng.standard_normal((2, 8)).astype(np.float32)
    with pytest.raises(BuilderError, match="needs a language model"):
        Score("perplexity").add({"x": y}, {"y": y}, {"y": y})
