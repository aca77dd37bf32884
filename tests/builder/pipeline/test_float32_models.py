"""Float32 models through the pipeline: fast kernels, what predictions are of, held-out samples, older plans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

from trt_nvfp4.builder.errors import BuilderError, VerificationError
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.pipeline.pipeline import Request
from trt_nvfp4.builder.pipeline.pipeline import run as run_pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.calibration.statistics.statistics import Statistics

# Made from `model` by the last version whose plans have no key `activations`.
OLDER_PLAN = Path(__file__).with_name("plan_before_activations.yaml")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A gated MLP of 3 * 64 * 128 weights and a linear of 64 * 64, float32; always the same."""
    rng = np.random.default_rng(7)
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[tokens, 64] x) => (float[tokens, 64] y) {
            [gate] g = MatMul(x, wg)
            [up] u = MatMul(x, wu)
            [sigmoid] s = Sigmoid(g)
            [silu] a = Mul(g, s)
            [gated] h = Mul(a, u)
            [down] d = MatMul(h, wd)
            [residual] r = Add(x, d)
            [out] y = MatMul(r, wo)
        }""")
    for name, shape in (("wg", (64, 128)), ("wu", (64, 128)), ("wd", (128, 64)), ("wo", (64, 64))):
        weight = (rng.standard_normal(shape) / 8).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


def samples(folder: Path, count: int, rng: np.random.Generator) -> Path:
    """The numbers of a sample are those of its place: all of sample 3 lies within 3 and 4."""
    folder.mkdir()
    for number in range(count):
        np.savez(folder / f"{number}.npz", x=(number + rng.random((5, 64))).astype(np.float32))
    return folder


def run(model: Path, **options: Any) -> dict[str, Any]:
    options = {"target": find_target("rtx-blackwell"), "output": model.parent / "out" / "o.engine", **options}
    report: dict[str, Any] = json.loads(run_pipeline(Request(model=model, **options)).json())
    return report


def test_fast_kernels_are_what_a_float32_model_gets(model: Path) -> None:
    report = run(model, require="nvfp4", require_fast=True, stop_after="plan")
    assert report["network"]["type"] == "bf16"
    assert [entry["kernels"].partition(":")[0] for entry in report["subgraphs"]] == ["W4A16", ""]


def test_generic_kernels_are_no_fast_ones(model: Path) -> None:
    """They would serve what is kept in float32: a warning, no prediction; with require_fast, nothing is written."""
    report = run(model, require="nvfp4", activations="keep", stop_after="plan")
    assert report["subgraphs"][0]["kernels"] == "generic: its activations are float32"
    (warning,) = (text for text in report["warnings"] if "generic kernels, correct and slow, serve gated_mlp_0" in text)
    assert "leave --activations at auto" in warning
    assert not report["predicted"]["subgraphs"]
    assert report["predicted"]["of"] == "no subgraph"
    left = {file.name: file.read_bytes() for file in (model.parent / "out").iterdir()}
    with pytest.raises(VerificationError, match=r"--set require-fast=yes cannot be met: generic kernels, .*float32"):
        run(model, require="nvfp4", require_fast=True, activations="keep", stop_after="plan")
    assert {file.name: file.read_bytes() for file in (model.parent / "out").iterdir()} == left


def test_fast_kernels_are_required_of_a_rewritten_model_too(model: Path) -> None:
    files = run(model, activations="keep", stop_after="rewrite")["files"]
    options = {"plan": Path(files["plan"]), "require": "nvfp4", "require_fast": True, "stop_after": None}
    with pytest.raises(
        BuilderError, match=r"--set require-fast=yes cannot be met: .*gated_mlp_0: its activations are float32"
    ):
        run(Path(files["rewritten model"]), output=model.parent / "o.engine", **options)
    assert not (model.parent / "o.engine").exists()


@pytest.mark.parametrize(
    ("options", "products"), [({"activations": "keep"}, {"out"}), ({"keep_fp32": "^out$"}, {"out"}), ({}, set())]
)
def test_an_engines_float32_products_are_named(model: Path, options: dict[str, Any], products: set[str]) -> None:
    """As TensorRT lists them; none that the plan does not name. Casts of its own put the MLP in BF16."""
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    report = run(model, precision="bf16", **options)
    assert set(report["network"]["float32_products"]) == products
    assert not [text for text in report["warnings"] if "multiplies in float32" in text]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("gated_mlp",), "1 replaced products, not the whole model: 86% of its weight bytes, 86% of the operations"),
        (("gated_mlp", "linear"), "2 replaced products, not the whole model: 100% of its weight bytes, 100%"),
    ],
)
def test_a_prediction_says_what_it_is_of(model: Path, kinds: tuple[str, ...], text: str) -> None:
    """24,576 of 28,672 weights are the MLP's."""
    report = run(model, kinds=kinds, stop_after="plan")
    assert report["predicted"]["of"].startswith(text)
    page = (model.parent / "out" / "o.report.html").read_text()
    assert report["predicted"]["of"] in page


@pytest.mark.parametrize(("count", "measured", "calibrated_on"), [(4, 2, 4), (5, 1, 4), (7, 2, 5)])
def test_accuracy_is_measured_on_samples_that_are_not_calibrated_on(
    model: Path, count: int, measured: int, calibrated_on: int, rng: np.random.Generator
) -> None:
    """The largest value says which samples the statistics are of."""
    report = run(model, calib_data=samples(model.parent / "samples", count, rng), stop_after="rewrite")
    statistics = Statistics.load(Path(report["files"]["statistics"]), model)
    assert calibrated_on - 1 < statistics.amax["x"] < calibrated_on
    assert report["accuracy"]["samples"] == measured
    assert report["accuracy"]["held_out"] == (count > 4)


def test_an_older_plan_is_carried_out_as_it_was(model: Path) -> None:
    """In float32, by the plugins that it names, to the numbers that the version which made it wrote."""
    report = run(model, plan=OLDER_PLAN, stop_after="rewrite")
    assert report["network"]["type"] == "keep"
    assert {entry["decision"] for entry in report["subgraphs"]} == {"nvfp4_w4a16"}
    rewritten = Path(report["files"]["rewritten model"])
    graph = onnx.load(rewritten).graph
    assert [node.op_type for node in graph.node] == ["NVFP4GatedMLP", "Add", "NVFP4Linear"]
    assert {tensor.data_type for tensor in graph.initializer} == {TensorProto.INT8, TensorProto.FLOAT}
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    y = np.asarray(session(rewritten).run(None, {"x": x})[0])
    assert y[0, :5] == pytest.approx([1.10494959, 0.71249932, -0.32904199, 0.08807283, 0.67724460], rel=1e-5)
