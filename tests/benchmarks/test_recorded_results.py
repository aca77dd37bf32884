"""The recorded decode results are complete and consistent with the workloads they name."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.hybrid_parts import HYBRIDS
from trt_nvfp4.builder.bench.timing import Timing

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BYTES_PER_WEIGHT = 0.5 + 1 / 16


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BENCHMARKS / "results" / "kernels" / "decode.json").read_text())
    return result


@pytest.fixture(scope="module")
def workloads() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BENCHMARKS / "workloads.json").read_text())
    return result


def test_every_decode_workload_was_measured(recorded: dict[str, Any], workloads: dict[str, Any]) -> None:
    measured = {(case["m"], case["n"], case["k"]) for case in recorded["linear"]}
    assert measured >= {tuple(shape) for shape in workloads["linear"]["shapes"] if shape[0] <= 64}
    assert {case["m"] for case in recorded["stack"]} == {m for m in workloads["mlp_stack"]["tokens"] if m <= 64}


def test_fractions_follow_from_times(recorded: dict[str, Any], workloads: dict[str, Any]) -> None:
    spec = workloads["mlp_stack"]
    for case in [*recorded["stack"], *recorded["linear"]]:
        weights = case["n"] * case["k"] if "n" in case else spec["layers"] * 3 * spec["hidden"] * spec["intermediate"]
        for name, fraction in case["bandwidth_fractions"].items():
            bytes_per_second = weights * BYTES_PER_WEIGHT / case["timings"][name]["median_us"] * 1e6
            assert fraction == pytest.approx(bytes_per_second / recorded["read_bandwidth"])


@pytest.mark.parametrize(
    "name",
    [
        *("decode", "decode_h100", "decoder", "diffusion_linears", "fp8_mlp", "fp8_moe", "hybrid_steps"),
        *("linear_attention", "moe", "nvfp4_or_fp8", "quantize"),
    ],
)
def test_recorded_timings_are_those_that_would_be_recorded(name: str) -> None:
    """No field of an old run goes by another name today."""
    known = {field.name for field in fields(Timing)}
    run = json.loads((BENCHMARKS / "results" / "kernels" / f"{name}.json").read_text())
    timings = [
        timing
        for value in run.values()
        if isinstance(value, list)
        for case in value
        for timing in case["timings"].values()
    ]
    assert timings
    assert all({"median_us", "rounds"} <= timing.keys() <= known for timing in timings)


def test_results_were_right(recorded: dict[str, Any]) -> None:
    for case in [*recorded["stack"], *recorded["linear"]]:
        for name, error in case["relative_errors"].items():
            assert error < (2e-3 if "fp16" in name else 1e-2), (case["m"], name)


def test_decode_steps_state_their_floor() -> None:
    """Every model at both batches and all lengths, and fractions that follow from times and bytes."""
    run = json.loads((BENCHMARKS / "results" / "kernels" / "decoder.json").read_text())
    measured = {(step["model"], step["batch"], step["length"]) for step in run["steps"]}
    assert measured == {(name, b, n) for name in run["shapes"] for b in (1, 8) for n in (1024, 8192, 32768)}
    for step in run["steps"]:
        shape, batch = run["shapes"][step["model"]], step["batch"]
        cached = 2 * shape["layers"] * batch * shape["kv_heads"] * shape["head_dim"] * step["length"]
        assert step["floor_bytes"]["bfloat16"] - step["floor_bytes"]["e4m3"] == pytest.approx(cached)
        for name, fraction in step["fraction_of_floor"].items():
            read = step["floor_bytes"]["e4m3" if "FP8 caches" in name else "bfloat16"]
            seconds = step["timings"][name]["median_us"] * 1e-6
            assert fraction == pytest.approx(read / step["read_bandwidth"] / seconds)


def test_hybrid_steps_state_their_floor() -> None:
    """Both models at both batches and lengths, 4 tokens of one sequence too; fractions that follow; right results."""
    run = json.loads((BENCHMARKS / "results" / "kernels" / "hybrid_steps.json").read_text())
    measured = {(step["model"], step["batch"], step["tokens"], step["length"]) for step in run["steps"]}
    sizes = [(1, 1), (8, 1), (1, 4)]
    assert measured == {(name, *size, length) for name in HYBRIDS for size in sizes for length in (1024, 8192)}
    for step in run["steps"]:
        shape = HYBRIDS[step["model"]]
        assert step["floor_bytes"] == pytest.approx(shape.floor(step["batch"], step["tokens"], step["length"]))
        assert step["floor_us"] == pytest.approx(sum(step["floor_bytes"].values()) / run["read_bandwidth"] * 1e6)
        assert step["fraction_of_floor"] == pytest.approx(step["floor_us"] / step["timings"]["parts"]["median_us"])
        assert step["finite"]
    assert all(layers["difference"] < 2e-2 for layers in run["recurrent_layers"])
