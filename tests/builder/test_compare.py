"""compare-engine: metrics against NumPy, inputs that fit, models that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from typer.testing import CliRunner

from trt_nvfp4.builder import compare, errors
from trt_nvfp4.builder.backend import local_compute_capability
from trt_nvfp4.builder.cli.compare_engine import app
from trt_nvfp4.builder.plugin_comparison import compare_plugins
from trt_nvfp4.builder.targets import arch_of, find_target
from trt_nvfp4.graph_passes.find import find_subgraphs
from trt_nvfp4.graph_passes.plan import Plan, make_plan
from trt_nvfp4.graph_passes.rewrite import rewrite
from trt_nvfp4.graph_passes.source import load
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.library import build_library
from trt_nvfp4.plugins.ops import OPS


def rewritten(model: Path) -> Path:
    """`o.rewritten.onnx` and `o.plan.yaml` beside the model, weights in NVFP4."""
    source = load(model)
    plan = make_plan(source, find_subgraphs(source), find_target("rtx-blackwell").capabilities)
    plan.save(model.with_name("o.plan.yaml"))
    return rewrite(source, plan, None, model.with_name("o.rewritten.onnx")).path


def test_metrics_against_their_definitions(rng: np.random.Generator) -> None:
    row = compare.Agreement("y", "output")
    pairs = [(x := rng.standard_normal((3, 5, 7)), x + 0.3 * rng.standard_normal(x.shape)) for _ in range(4)]
    for x, y in pairs:
        row.add(x, y)
    cosines = [np.vdot(x, y) / np.sqrt(np.vdot(x, x) * np.vdot(y, y)) for x, y in pairs]
    xs, ys = np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])
    assert row.cosine == pytest.approx(min(cosines), rel=1e-12)
    assert row.sqnr_db == pytest.approx(10 * np.log10((xs**2).sum() / ((xs - ys) ** 2).sum()), rel=1e-12)
    assert row.max_abs == np.abs(xs - ys).max()
    assert row.argmax == np.mean(xs.argmax(-1) == ys.argmax(-1))


def test_nan_is_no_agreement() -> None:
    row = compare.Agreement("y", "output")
    row.add(np.ones(4), np.array([1, np.nan, 1, 1]))
    assert np.isnan(row.cosine)
    row.add(np.ones(4), np.ones(4))
    assert np.isnan(row.cosine)


def test_zeros_agree_with_zeros_alone() -> None:
    row = compare.Agreement("y", "output")
    row.add(np.zeros(4), np.zeros(4))
    assert row.cosine == 1
    row.add(np.zeros(4), np.ones(4))
    assert row.cosine == 0


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_rewritten_model_is_near_the_original(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    result = rewritten(model)
    plan = Plan.load(tmp_path / "o.plan.yaml")
    found = compare.compare(model, result, compare.random_samples(model, 2, rng), plan)["rewritten"]
    assert [row.kind for row in found] == ["output", "subgraph", "subgraph"]
    for row in found:
        # Every NVFP4 weight matrix leaves about 20 dB; exact agreement would mean that nothing was replaced.
        assert 10 < row.sqnr_db < 30, row
        assert 0.95 < row.cosine < 1, row
        assert row.max_abs > 0


class ReferenceHost:
    """Stands for the plugin host on a machine without a GPU: computes by the ops' Torch references."""

    @contextmanager
    def session(self, op: str, inputs: list[torch.Tensor], attributes: dict[str, Any]) -> Iterator[ReferenceHost]:
        self.op, self.attributes = op, attributes
        yield self

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [OPS[self.op].reference(*inputs, **self.attributes)]


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_plugins_get_what_their_bodies_get(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    samples = compare.random_samples(model, 2, rng, {"x": (9, 64)})
    rows = compare_plugins(rewritten(model), samples, ReferenceHost(), device="cpu")
    assert [row.name for row in rows] == ["gated_mlp_0", "gated_mlp_1"]
    # Rounding to 16 bits differs: ONNX Runtime computes bfloat16 in float32.
    assert all(row.sqnr_db > (40 if elem_type == TensorProto.BFLOAT16 else 60) for row in rows), rows


@pytest.mark.gpu
def test_plugins_on_the_gpu(gated_mlps: Path, rng: np.random.Generator) -> None:
    capability = local_compute_capability()
    assert capability is not None
    host = PluginHost(build_library(arch_of(capability)))
    samples = compare.random_samples(gated_mlps, 2, rng, {"x": (9, 64)})
    rows = compare_plugins(rewritten(gated_mlps), samples, host)
    assert all(row.sqnr_db > 50 for row in rows), rows


def test_model_agrees_with_itself(gated_mlps: Path, rng: np.random.Generator) -> None:
    found = compare.compare(gated_mlps, gated_mlps, compare.random_samples(gated_mlps, 1, rng))
    (row,) = found["rewritten"]
    assert row.cosine == pytest.approx(1)
    assert row.max_abs == 0
    assert row.sqnr_db == np.inf


def test_random_inputs_make_sense(tmp_path: Path, rng: np.random.Generator) -> None:
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, shape),
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape),
            helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 8, 8]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, 4])],
        [onnx.numpy_helper.from_array(np.ones((30, 4), np.float32), "table")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    (sample,) = compare.random_samples(tmp_path / "m.onnx", 1, rng, {"input_ids": (2, 500)})
    assert sample["input_ids"].shape == (2, 500)
    assert sample["input_ids"].min() >= 0
    assert 15 < sample["input_ids"].max() < 30
    assert sample["attention_mask"].all()
    assert (sample["position_ids"] == np.arange(sample["position_ids"].shape[-1])).all()
    assert sample["pixels"].dtype == np.float32
    assert sample["pixels"].std() == pytest.approx(1, abs=0.3)


def test_command(gated_mlps: Path) -> None:
    result = rewritten(gated_mlps)
    shown = CliRunner().invoke(app, [str(gated_mlps), str(result), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["rewritten"]
    assert {row["kind"] for row in rows} == {"output", "subgraph"}
    assert all(row.keys() == {"name", "kind", "cosine", "sqnr_db", "max_abs", "argmax"} for row in rows)

    engine = gated_mlps.with_name("o.engine")
    table = CliRunner().invoke(app, [str(gated_mlps), str(engine), "--samples", "1"])
    assert table.exit_code == 0, table.output
    assert "gated_mlp_1" in table.stdout

    strict = CliRunner().invoke(app, [str(gated_mlps), str(engine), "--min-cosine", "0.99999"])
    assert strict.exit_code == errors.VERIFICATION_FAILED
    assert "is below 0.99999" in strict.stderr


def test_command_names_the_missing_file(gated_mlps: Path) -> None:
    shown = CliRunner().invoke(app, [str(gated_mlps), str(gated_mlps.with_name("none.engine"))])
    assert shown.exit_code == errors.USAGE
    assert "none.rewritten.onnx" in shown.stderr
