"""Whether several GPUs pay: by hand-made products, and against what was measured on two H200."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.builder.parallel.prediction import NVLINK_4, NVLINK_5, PCIE_5, SUM_US, predict, shown, sum_us
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
    products = [{"tokens": 1, "predicted_us": {"nvfp4": least}} for _ in range(2)]
    found = predict("h200", Rank(0, 2), products, rank_file(tmp_path / "m.onnx", 2, 8192))
    assert (found["sums"], found["products_us"], found["one_gpu_us"]) == (2, 2 * least, 4 * least)
    assert verdict in shown(found)


def test_nothing_is_said_without_products(tmp_path: Path) -> None:
    assert predict("h200", Rank(0, 2), [], tmp_path / "missing.onnx") == {}


def test_nothing_is_said_of_spread_experts_and_of_unknown_widths(tmp_path: Path) -> None:
    products = [{"tokens": 1, "predicted_us": {"nvfp4": 50.0}}]
    file = rank_file(tmp_path / "m.onnx", 1, 64)
    assert predict("h200", Rank(0, 2), products, file)
    assert predict("h200", Rank(0, 2, 2), products, file) == {}
    unknown = onnx.load(file)
    unknown.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "width"
    onnx.save(unknown, file)
    assert predict("h200", Rank(0, 2), products, file) == {}
    del unknown.graph.output[:]
    onnx.save(unknown, file)
    assert predict("h200", Rank(0, 2), products, file) == {}


def test_the_measured_sums_of_two_gpus() -> None:
    (file,) = RESULTS.rglob("parallel.json")
    steps = json.loads(file.read_text())["steps"]
    sums = [step["timings"]["the sum"]["median_us"] for step in steps]
    assert sums
    for step, measured in zip(steps, sums, strict=True):
        width = 8192 if "70B" in step["problem"] else 2048
        assert 0.5 < sum_us(step["tokens"] * width, 2, NVLINK_4) / measured < 1.5
