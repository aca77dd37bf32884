"""Metrics of agreement against NumPy and Torch."""

import numpy as np
import pytest
import torch

from trt_nvfp4.builder.accuracy.metrics import Agreement
from trt_nvfp4.common.metrics import cosine, kl_divergence


def test_metrics_against_their_definitions(rng: np.random.Generator) -> None:
    row = Agreement("y", "output", with_kl=True)
    pairs = [(x := rng.standard_normal((3, 5, 7)), x + 0.3 * rng.standard_normal(x.shape)) for _ in range(4)]
    for x, y in pairs:
        row.add(x, y)
    cosines = [np.vdot(x, y) / np.sqrt(np.vdot(x, x) * np.vdot(y, y)) for x, y in pairs]
    xs, ys = np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])
    assert row.cosine == pytest.approx(min(cosines), rel=1e-12)
    assert row.worst_sample == int(np.argmin(cosines))
    assert row.sqnr_db == pytest.approx(10 * np.log10((xs**2).sum() / ((xs - ys) ** 2).sum()), rel=1e-12)
    assert row.max_abs == np.abs(xs - ys).max()
    assert row.max_rel == pytest.approx((np.abs(xs - ys) / np.abs(xs)).max(), rel=1e-12)
    assert row.argmax == np.mean(xs.argmax(-1) == ys.argmax(-1))
    by_torch = [
        torch.nn.functional.kl_div(
            torch.from_numpy(y).log_softmax(-1), torch.from_numpy(x).log_softmax(-1), reduction="sum", log_target=True
        ).item()
        / 15
        for x, y in pairs
    ]
    assert row.kl == pytest.approx(max(by_torch), rel=1e-9)
    assert kl_divergence(xs, xs) == 0


def test_nan_is_no_agreement() -> None:
    row = Agreement("y", "output")
    row.add(np.ones(4), np.ones(4))
    row.add(np.ones(4), np.array([1, np.nan, 1, 1]))
    row.add(np.ones(4), np.ones(4))
    assert np.isnan(row.cosine)
    assert np.isnan(row.max_abs)
    assert row.worst_sample == 1
    assert row.as_dict()["cosine"] is None


def test_infinity_is_no_agreement() -> None:
    """Not even with itself: by that an original is refused whose outputs are not finite."""
    values = np.array([1, np.inf, -np.inf, 0])
    assert np.isnan(cosine(values, values))
    assert cosine(values[:1], values[:1]) == 1


def test_zeros_agree_with_zeros_alone() -> None:
    row = Agreement("y", "output")
    for _ in range(2):
        row.add(np.zeros(4), np.zeros(4))
    assert (row.cosine, row.max_rel, row.worst_sample) == (1, 0, 0)
    row.add(np.zeros(4), np.ones(4))
    assert (row.cosine, row.max_rel, row.sqnr_db) == (0, np.inf, -np.inf)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_that_no_float64_tells_apart_differ(dtype: type[np.integer], rng: np.random.Generator) -> None:
    x = rng.integers(2**53, 2**62, 100).astype(dtype)
    for y in (x + dtype(1), x - dtype(1)):
        row = Agreement("ids", "output", discrete=True)
        row.add(x, y)
        assert row.equal == 0
        # The next float64, at the least.
        assert 1 <= row.max_abs <= 2**10
        assert 0 < row.max_rel < 1e-15
        assert 300 < row.sqnr_db < np.inf
        same = Agreement("ids", "output", discrete=True)
        same.add(y, y)
        assert (same.max_abs, same.max_rel, same.sqnr_db) == (0, 0, np.inf)


def test_scalars_and_single_entries_are_no_logits() -> None:
    for x, y in ((np.array(2.0), np.array(2.5)), (np.array([[2.0]]), np.array([[2.5]]))):
        row = Agreement("loss", "output", with_kl=True)
        row.add(x, y)
        assert (row.max_abs, row.max_rel, row.argmax, row.kl) == (0.5, 0.25, 1, None)
        assert row.cosine == pytest.approx(1)
