"""The mixes of precisions that a search tries: the knapsack against brute force, ties, NaN, bisection."""

import itertools
import math

import numpy as np
import pytest

from trt_nvfp4.builder.accuracy.precision_search import Option, Part, efficient, first, mixes_by_cost


def random_options(rng: np.random.Generator, subgraphs: int) -> dict[str, list[Option]]:
    """Dearer is usually better, not always; some cost or lose the same."""
    options = {}
    for index in range(subgraphs):
        seconds = rng.integers(1, 6, 4) * 1e-6
        losses = rng.integers(0, 9, 4) / 1000
        options[f"mlp{index}"] = [
            Option(decision, float(second), float(loss), 1 - float(loss))
            for decision, second, loss in zip(
                ("nvfp4_w4a4", "nvfp4_w4a16", "fp8", "keep"), seconds, losses, strict=True
            )
        ]
    return options


def totals(mix: dict[str, Option]) -> tuple[float, float]:
    return sum(option.seconds for option in mix.values()), sum(option.loss for option in mix.values())


def test_mixes_are_the_optimal_ones(rng: np.random.Generator) -> None:
    for _ in range(20):
        options = random_options(rng, 4)
        mixes = mixes_by_cost(options)
        costs, losses = zip(*map(totals, mixes), strict=True)
        assert list(costs) == sorted(set(costs))
        assert list(losses) == sorted(set(losses), reverse=True)
        every = [totals(dict(zip(options, chosen, strict=True))) for chosen in itertools.product(*options.values())]
        for cost, loss in zip(costs, losses, strict=True):
            # No mix costs no more and loses less: the row lies on the convex hull of all mixes.
            assert not any(c <= cost * (1 + 1e-9) and lost < loss - 1e-12 for c, lost in every)
        assert losses[-1] == pytest.approx(min(lost for _, lost in every))
        assert costs[0] == pytest.approx(min(c for c, _ in every))


def test_nan_is_the_last_resort() -> None:
    broken, sound = Option("nvfp4_w4a4", 1e-6, float("nan"), float("nan")), Option("keep", 2e-6, 0.0, 1.0)
    assert efficient([broken, sound]) == [broken, sound]
    assert efficient([Option("fp8", 1e-6, 0.1, 0.9), broken]) == [Option("fp8", 1e-6, 0.1, 0.9)]


def test_what_is_broken_is_raised_first() -> None:
    nan = float("nan")
    options = {
        name: [Option("nvfp4_w4a4", 1e-6, loss, 1 - loss), Option("fp8", 2e-6, 0.01, 0.99), Option("keep", 4e-6, 0, 1)]
        for name, loss in (("mlp0", nan), ("mlp1", 0.1), ("mlp2", nan), ("mlp3", 0.2))
    }
    mixes = mixes_by_cost(options)
    broken = [sum(math.isnan(option.loss) for option in mix.values()) for mix in mixes]
    assert broken == [2, 1, *[0] * 7]
    assert [sum(option.seconds for option in mix.values()) for mix in mixes] == sorted(
        sum(option.seconds for option in mix.values()) for mix in mixes
    )


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_bisection_finds_the_first(count: int) -> None:
    for threshold in range(count + 1):
        found = first(count, lambda index, threshold=threshold: index >= threshold)
        assert found == (threshold if threshold < count else None)


def test_parts_share_no_sample() -> None:
    samples = [{"x": np.array(i)} for i in range(10)]
    chosen, held_out = ([int(s["x"]) for s in Part(samples, part)] for part in (False, True))
    assert sorted(chosen + held_out) == list(range(10))
    assert held_out == [1, 5, 9]
