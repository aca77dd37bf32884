"""How contestants take turns, and what is made of their times."""

from collections.abc import Callable

import numpy as np
import pytest
from bench_stand_ins import CpuDevice

from trt_nvfp4.builder.bench import subgraphs as subgraph_bench
from trt_nvfp4.builder.bench.timing import Timing, interleave


def test_percentiles() -> None:
    timing = Timing.of([float(x) for x in range(1, 101)])
    assert [timing.median_us, timing.p90_us, timing.p99_us] == pytest.approx([50.5, 90.1, 99.01])
    assert [timing.lower_quartile_us, timing.upper_quartile_us] == [25.75, 75.25]
    assert timing.rounds == 100
    assert timing.drift == 75.5 / 25.5


def test_contestants_go_there_and_back() -> None:
    order: list[str] = []

    def contestant(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    device = CpuDevice()
    timings = interleave(device, {name: contestant(name) for name in "abc"}, rounds=2, warm_up=1, calls={"b": 2})
    assert "".join(order) == "abc" + "abc" + "cba" + "abc", "one run to capture, one round to warm up, two timed"
    # Runs 6 and 7 are a's; b's, 5 and 8, hold two calls each.
    assert timings["a"].median_us == pytest.approx((6 + 7) / 2 * 1e6)
    assert timings["b"].median_us == pytest.approx((5 + 8) / 2 / 2 * 1e6)
    assert all(timing.rounds == 2 for timing in timings.values())


def test_copies_of_weights_are_four_times_the_cache(rng: np.random.Generator) -> None:
    for weight, cache in rng.integers(1 << 10, 1 << 26, (50, 2)):
        copies = subgraph_bench._copies(float(weight), int(cache))
        assert 2 <= copies <= 256
        assert copies == 256 or copies * weight >= 4 * cache
        assert copies == 2 or (copies - 1) * weight < 4 * cache
