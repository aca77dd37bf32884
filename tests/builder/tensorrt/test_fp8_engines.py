"""An engine whose plan says FP8GatedMLP or FP8MoE: one plugin layer per MLP or block, built on a CPU."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from command_lines import invoked
from onnx import compose

from onnx_models import moe_spellings
from onnx_models.graphs import mlp_model, spec
from onnx_models.moe_spellings import Moe, MoeSpec
from onnx_models.packed_attention import packed_attention
from trt_nvfp4.builder.cli.build_engine import app

pytest.importorskip("tensorrt_rtx")


@pytest.mark.slow
def test_one_plugin_layer(tmp_path: Path, seed: int) -> None:
    model, _ = mlp_model(spec(biases=True, seed=seed))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    common = [str(path), "-o", str(tmp_path / "out.engine"), "--target", "rtx-blackwell", "--json"]
    common += ["--min-shapes", "x:1x1x32", "--opt-shapes", "x:2x4x32", "--max-shapes", "x:2x4x32"]
    invoked(app, [*common, "--precision", "fp8", "--stop-after", "plan"])
    plan_path = tmp_path / "out.plan.yaml"
    plan = yaml.safe_load(plan_path.read_text())
    (entry,) = plan["subgraphs"]
    assert (entry["decision"], entry["op"]) == ("fp8", "")
    edited = tmp_path / "edited.plan.yaml"
    edited.write_text(plan_path.read_text().replace("op: ''", "op: FP8GatedMLP"))
    assert yaml.safe_load(edited.read_text())["subgraphs"][0]["op"] == "FP8GatedMLP"

    result = invoked(app, [*common, "--plan", edited])
    report = json.loads(result.stdout)
    (subgraph,) = report["subgraphs"]
    assert (subgraph["decision"], subgraph["realized"]) == ("fp8", "fp8 plugin")
    assert report["plugin_layers"] == 1


@pytest.mark.slow
def test_a_mixture_of_experts(tmp_path: Path, seed: int) -> None:
    """Where the target has no kernels for it, the edited plan is followed all the same."""
    path = tmp_path / "model.onnx"
    moe_spellings.export(Moe(MoeSpec("gathered", shared=True), seed).half(), path, seed)
    common = [str(path), "-o", str(tmp_path / "out.engine"), "--target", "rtx-blackwell", "--json"]
    common += ["--min-shapes", "x:1x1x64", "--opt-shapes", "x:2x5x64", "--max-shapes", "x:2x5x64"]
    invoked(app, [*common, "--stop-after", "plan"])
    text = (tmp_path / "out.plan.yaml").read_text()
    assert text.count("decision: nvfp4_w4a16") == 1
    edited = tmp_path / "edited.plan.yaml"
    edited.write_text(text.replace("decision: nvfp4_w4a16", "decision: fp8"))

    result = invoked(app, [*common, "--plan", edited])
    report = json.loads(result.stdout)
    (subgraph,) = [entry for entry in report["subgraphs"] if entry["kind"] == "moe"]
    assert (subgraph["decision"], subgraph["realized"]) == ("fp8", "fp8 plugin")
    assert report["plugin_layers"] == 1


@pytest.mark.slow
def test_packed_queries_keys_and_values(tmp_path: Path, seed: int) -> None:
    """TensorRT moves the slices into the weight, and would dequantize one with scales of its own on every run."""
    blocks = [
        compose.add_prefix(packed_attention(product, unpacked, 120, 8, seed), f"{product}, {unpacked}: ")
        for product, unpacked in (("bias", "slice"), ("bias", "gather"), ("no bias", "split"), ("gemm", "slice"))
    ]
    model = blocks[0]
    for block in blocks[1:]:
        model = compose.merge_models(model, block, [(model.graph.output[0].name, block.graph.input[0].name)])
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(seed).standard_normal((2, 40, 120)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", **{model.graph.input[0].name: x})
    common = [str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.engine"), "--target", "rtx-blackwell", "--json"]
    options = ["--precision", "fp8", "--kinds", "linear", "--calib-data", str(tmp_path / "samples.npz")]

    result = invoked(app, [*common, *options])
    subgraphs = json.loads(result.stdout)["subgraphs"]
    assert [(entry["decision"], entry["realized"]) for entry in subgraphs] == [("fp8", "fp8")] * 8
