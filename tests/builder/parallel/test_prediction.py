"""Whether several GPUs pay: by hand-made products, and against what was measured on two H200."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.builder.parallel.prediction import (
    NVLINK_4,
    NVLINK_5,
    PCIE_5,
    SUM_US,
    most_chosen,
    predict,
    shown,
    sum_us,
)
from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.common.collectives import DOMAIN, NAME, attributes

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rank_file(path: Path, sums: int, width: int) -> Path:
    names = [f"x{index}" for index in range(sums + 1)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["tokens", width]) for name in names]
    nodes = [helper.make_node(NAME, [x], [y], domain=DOMAIN, **attributes(2)) for x, y in itertools.pairwise(names)]
    graph = helper.make_graph(nodes, "rank", values[:1], values[-1:], value_info=values[1:-1])
    onnx.save(helper.make_model(graph), path)
    return path


def test_a_sum_over_a_slower_link_takes_longer() -> None:
    values = 64 * 8192
    assert sum_us(0, 2, PCIE_5) == SUM_US
    assert sum_us(values, 2, PCIE_5) == pytest.approx(SUM_US + values * 2 / 64e9 * 1e6)
    assert sum_us(values, 8, NVLINK_5) > sum_us(values, 2, NVLINK_5)
    assert sum_us(values, 2, NVLINK_5) < sum_us(values, 2, NVLINK_4) < sum_us(values, 2, PCIE_5)


@pytest.mark.parametrize(
    ("least", "verdict"), [(50.0, "2 GPUs are 1.67 times as fast as one"), (5.0, "2 GPUs are slower than one")]
)
def test_large_products_pay_and_small_ones_do_not(tmp_path: Path, least: float, verdict: str) -> None:
    products = [{"kind": "gated_mlp", "tokens": 1, "predicted_us": {"nvfp4": least}} for _ in range(2)]
    found = predict("h200", Rank(0, 2), products, rank_file(tmp_path / "m.onnx", 2, 8192))
    assert found is not None
    assert (found.sums, found.products_us, found.one_gpu_us) == (2, 2 * least, 4 * least)
    assert verdict in shown(found)


def test_nothing_is_said_without_products(tmp_path: Path) -> None:
    assert predict("h200", Rank(0, 2), [], tmp_path / "missing.onnx") is None


def mixture(experts: int, top_k: int, tokens: int, us: float = 50.0) -> dict[str, Any]:
    shapes = {"experts": experts, "top_k": top_k, "intermediate_features": 768, "shared_features": 0}
    return {"kind": "moe", "tokens": tokens, "shapes": shapes, "predicted_us": {"nvfp4": us}}


def test_the_rank_with_most_of_the_chosen_experts_is_waited_for(tmp_path: Path) -> None:
    """One token chooses 8 of 128 experts: of four ranks one has about four of them, where the roofline counts 8."""
    file = rank_file(tmp_path / "m.onnx", 1, 64)
    few = predict("h200", Rank(0, 4, 4), [mixture(32, 8, 1)], file, 8)
    slowest = most_chosen(128, 8, 1, 4)
    assert 3 < slowest < 5
    assert few.products_us == pytest.approx(50 * slowest / 8)
    assert few.one_gpu_us == pytest.approx(50)
    # Two ranks share each expert: one GPU reads both parts.
    halves = predict("h200", Rank(0, 4, 2), [mixture(64, 8, 1)], file, 8)
    assert halves.one_gpu_us == pytest.approx(2 * 50)
    # So many tokens choose all experts, and every rank reads all of its own.
    many = predict("h200", Rank(0, 4, 4), [mixture(32, 8, 4096)], file, 8)
    assert (many.products_us, many.one_gpu_us) == (pytest.approx(50), pytest.approx(200))
    assert "chosen evenly at random" in shown(many)
    assert "4 GPUs are" in shown(few)


@pytest.mark.parametrize(("experts", "top_k", "tokens", "shares"), [(8, 2, 1, 4), (8, 2, 3, 2), (16, 1, 40, 8)])
def test_the_most_chosen_share(experts: int, top_k: int, tokens: int, shares: int) -> None:
    rng = np.random.default_rng(5)
    counts = []
    for _ in range(2000):
        chosen = {int(expert) for _ in range(tokens) for expert in rng.choice(experts, top_k, replace=False)}
        counts.append(max(sum(expert * shares // experts == share for expert in chosen) for share in range(shares)))
    assert most_chosen(experts, top_k, tokens, shares) == pytest.approx(np.mean(counts), rel=0.06)


def test_nothing_is_said_without_the_number_chosen_and_of_unknown_widths(tmp_path: Path) -> None:
    products = [mixture(32, 8, 1)]
    file = rank_file(tmp_path / "m.onnx", 1, 64)
    assert predict("h200", Rank(0, 2), products, file)
    assert predict("h200", Rank(0, 2, 2), products, file) is None
    unknown = onnx.load(file)
    unknown.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "width"
    onnx.save(unknown, file)
    assert predict("h200", Rank(0, 2), products, file) is None
    del unknown.graph.output[:]
    onnx.save(unknown, file)
    assert predict("h200", Rank(0, 2), products, file) is None


def test_the_measured_sums_of_two_gpus() -> None:
    (file,) = RESULTS.rglob("parallel.json")
    steps = json.loads(file.read_text())["steps"]
    sums = [step["timings"]["the sum"]["median_us"] for step in steps]
    assert sums
    for step, measured in zip(steps, sums, strict=True):
        width = 8192 if "70B" in step["problem"] else 2048
        assert 0.5 < sum_us(step["tokens"] * width, 2, NVLINK_4) / measured < 1.5
