"""--precision native-nvfp4: what TensorRT-RTX builds reads FP4, and what reads something else is refused."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app

needs_tensorrt = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="builds with TensorRT-RTX")


def build(model: Path, *options: str, target: str = "rtx-blackwell") -> Result:
    output = str(model.parent / "out" / "o.engine")
    decided = [] if "--plan" in options else ["--precision", "native-nvfp4"]
    return CliRunner().invoke(app, [str(model), "-o", output, "--target", target, *decided, "--json", *options])


@pytest.fixture
def samples(gated_mlps: Path, rng: np.random.Generator) -> str:
    path = gated_mlps.parent / "samples.npz"
    np.savez(path, x=rng.standard_normal((5, 64)).astype(np.float16))
    return str(path)


@needs_tensorrt
def test_engine_reads_fp4(gated_mlps: Path, samples: str) -> None:
    shown = build(gated_mlps, "--calib-data", samples, "--require", "nvfp4")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert [entry["realized"] for entry in report["subgraphs"]] == ["native_nvfp4"] * 2
    assert report["plugin_layers"] == 0
    assert "ONNX Runtime cannot run this model" in report["accuracy"]["not_measured"]
    assert Path(report["engine"]).stat().st_size == report["engine_bytes"]


@needs_tensorrt
def test_going_on_from_the_rewritten_model(gated_mlps: Path, samples: str) -> None:
    assert build(gated_mlps, "--calib-data", samples, "--stop-after", "rewrite").exit_code == 0
    out = gated_mlps.parent / "out"
    shown = build(out / "o.rewritten.onnx", "--plan", str(out / "o.plan.yaml"))
    assert shown.exit_code == 0, shown.output
    assert {entry["realized"] for entry in json.loads(shown.stdout)["subgraphs"]} == {"native_nvfp4"}


def test_bundle_asks_for_a_tensorrt_that_has_it(gated_mlps: Path, samples: str) -> None:
    folder = gated_mlps.parent / "bundle"
    shown = build(gated_mlps, "--calib-data", samples, "--bundle", str(folder), target="thor")
    assert shown.exit_code == 0, shown.output
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["modules"] == {"tensorrt": "11.0"}
    assert manifest["plugin_library"] is None
    assert {entry["decision"] for entry in manifest["planned"]} == {"native_nvfp4"}
    kinds = [node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]
    assert kinds.count("TRT_FP4DynamicQuantize") == 4


def test_without_samples(gated_mlps: Path) -> None:
    shown = build(gated_mlps, "--stop-after", "rewrite")
    assert shown.exit_code == errors.USAGE
    assert "--calib-data" in shown.stderr
