"""An engine whose plan says FP8GatedMLP: one plugin layer per MLP, built on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import yaml
from typer.testing import CliRunner

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.builder.cli.build_engine import app

pytest.importorskip("tensorrt_rtx")


@pytest.mark.slow
def test_one_plugin_layer(tmp_path: Path, seed: int) -> None:
    model, _ = mlp_model(spec(biases=True, seed=seed))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    common = [
        str(path),
        "-o",
        str(tmp_path / "out.engine"),
        "--target",
        "rtx-blackwell",
        "--precision",
        "fp8",
        "--json",
    ]
    common += ["--min-shapes", "x:1x1x32", "--opt-shapes", "x:2x4x32", "--max-shapes", "x:2x4x32"]
    planned = CliRunner().invoke(app, [*common, "--stop-after", "plan"])
    assert planned.exit_code == 0, planned.output
    plan_path = tmp_path / "out.plan.yaml"
    plan = yaml.safe_load(plan_path.read_text())
    (entry,) = plan["subgraphs"]
    assert (entry["decision"], entry["op"]) == ("fp8", "")
    edited = tmp_path / "edited.plan.yaml"
    edited.write_text(plan_path.read_text().replace("op: ''", "op: FP8GatedMLP"))
    assert yaml.safe_load(edited.read_text())["subgraphs"][0]["op"] == "FP8GatedMLP"

    result = CliRunner().invoke(app, [*common, "--plan", str(edited)])

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (subgraph,) = report["subgraphs"]
    assert (subgraph["decision"], subgraph["realized"]) == ("fp8", "fp8 plugin")
    assert report["plugin_layers"] == 1
