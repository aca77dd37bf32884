"""Clocks of a word against the counted instructions, and against what an H200 took for a word."""

import json
from pathlib import Path

import pytest

from trt_nvfp4.builder.roofline.predict import LIMITS, issue_seconds, subgraph_cost
from trt_nvfp4.builder.roofline.word_clocks import LOOPS, word_clocks

RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "kernels" / "issue_slots.json"
FAMILIES = {"sm_89": "sm89", "sm_90a": "sm90", "sm_100a": "sm100", "sm_120a": "sm120"}


def test_loops_are_those_of_the_record() -> None:
    loops = json.loads(RECORD.read_text())["loops"]
    assert len(loops) == sum(len(found) for found in LOOPS.values()) == 32
    for entry in loops:
        loop = LOOPS[FAMILIES[entry["arch"]], entry["dtype"]][entry["tokens"]]
        counted = [entry["alu"], entry["fma"], entry["mma"], entry["all"]]
        assert [loop.alu, loop.fma, loop.mma, loop.issued] == pytest.approx(counted, abs=0.006)


def test_every_target_has_loops() -> None:
    assert {limits.family for limits in LIMITS.values()} == {family for family, _ in LOOPS}


@pytest.mark.parametrize(("tokens", "measured"), [(1, 17.5), (8, 22.7), (16, 27), (32, 31), (64, 40)])
def test_hopper_as_measured(tokens: int, measured: float) -> None:
    """benchmarks/notes, "clocks a word": the faster of mma.sync and wgmma."""
    assert word_clocks("sm90", "float16", tokens) == pytest.approx(measured, rel=0.06)


def test_passes_add_up() -> None:
    one, tail = (word_clocks("sm100", "bfloat16", tokens) for tokens in (32, 5))
    assert word_clocks("sm100", "bfloat16", 3 * 32 + 5) == pytest.approx(3 * one + tail)
    assert word_clocks("sm90", "bfloat16", 128) == pytest.approx(2 * word_clocks("sm90", "bfloat16", 64))


def test_few_rows_an_expert_cost_what_few_rows_cost() -> None:
    """64 tokens that choose 2 of 64 experts are about two for each expert that is read."""
    shapes = {"in_features": 4096, "intermediate_features": 4096, "out_features": 4096, "gated": 1}
    mixture = subgraph_cost("moe", {**shapes, "experts": 64, "top_k": 2}, "nvfp4_w4a16", 64, LIMITS["b200"])
    dense = subgraph_cost("moe", {**shapes, "experts": 2, "top_k": 2}, "nvfp4_w4a16", 64, LIMITS["b200"])
    assert (mixture.bound, dense.bound) == ("memory", "issue")
    assert dense.seconds == issue_seconds(2 * 3 * 4096 * 4096, 64, LIMITS["b200"], "bfloat16")
