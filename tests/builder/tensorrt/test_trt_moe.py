"""--set moe=trt_moe: TensorRT's own MoE layer where target and block have it, else the plugin and the reason why."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_lines import invoked
from planned_nodes import planned_nodes

from onnx_models import moe_spellings
from onnx_models.moe_spellings import Moe, MoeSpec
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.errors import USAGE
from trt_nvfp4.builder.tensorrt.verify import Layer, Outcome, check_layers
from trt_nvfp4.graph_passes.planning.plan import Plan

OPTIONS = ["--set", "moe=trt_moe", "--kinds", "moe", "--max-shapes", "x:2x16x64", "--json"]


@pytest.fixture
def model(tmp_path: Path, seed: int) -> Path:
    path = tmp_path / "model.onnx"
    moe_spellings.export(Moe(MoeSpec("gathered", scoring="sigmoid", shared=True), seed).half(), path, seed)
    return path


def test_bundle_holds_the_layer(model: Path, tmp_path: Path) -> None:
    """TensorRT's parser makes its MoE layer of it; the device needs a version that has one, and no plugin library."""
    trt = pytest.importorskip("tensorrt_rtx", reason="reads the model with TensorRT-RTX's parser")
    bundle = tmp_path / "bundle"
    result = invoked(app, [model, "--target", "b200", "--bundle", bundle, *OPTIONS])
    (entry,) = [entry for entry in json.loads(result.stdout)["subgraphs"] if entry["kind"] == "moe"]
    assert entry["decision"] == "trt_moe"
    assert entry["reason"] == "TensorRT's own MoE layer, experts in float16"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["modules"] == {"tensorrt": "10.16"}
    assert manifest["plugin_library"] is None
    (planned,) = manifest["planned"]
    assert (planned["name"], planned["carrier"]) == (entry["name"], "trt_moe")
    assert planned["engine_nodes"] == [entry["name"]]
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(bundle / "model.onnx")), parser.get_error(0).desc()
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    (layer,) = [layer for layer in layers if layer.type == trt.LayerType.MOE]
    layer.__class__ = trt.IMoELayer
    assert layer.activation_type == trt.MoEActType.SILU
    shapes = [tuple(layer.get_input(index).shape) for index in range(layer.num_inputs)]
    assert shapes[0][-1] == 64
    assert shapes[3:] == [(4, 64, 48), (4, 64, 48), (4, 48, 64)]


def test_target_without_the_layer(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, [str(model), "--target", "h200", "-o", str(tmp_path / "o.engine"), "--stop-after", "plan", *OPTIONS]
    )
    # H200 engines are not built here; only the plan is asked for.
    assert result.exit_code == 0, result.output
    (entry,) = [entry for entry in json.loads(result.stdout)["subgraphs"] if entry["kind"] == "moe"]
    assert entry["decision"] == "nvfp4_w4a16"
    assert entry["reason"].startswith("TensorRT has no MoE layer for h200; W4A16, ")


def test_a_model_without_plugins_is_rewritten_too(model: Path, tmp_path: Path) -> None:
    """Neither TensorRT's MoE layer nor 16 bits leave a node of ours behind."""
    for name, decision in (("trt_moe", "trt_moe"), ("plugin", "keep")):
        target = ["--target", "b200", "-o", str(tmp_path / f"{name}.engine"), "--precision", "bf16"]
        options = ["--kinds", "moe", "--max-shapes", "x:2x16x64", "--set", f"moe={name}", "--stop-after", "rewrite"]
        assert CliRunner().invoke(app, [str(model), *target, *options]).exit_code == 0
        rewritten = tmp_path / f"{name}.rewritten.onnx"
        (entry,) = [e for e in Plan.load(tmp_path / f"{name}.plan.yaml").subgraphs if e.kind == "moe"]
        assert entry.decision == decision
        invoked(app, [rewritten, *target, *options], USAGE, "has been rewritten already; add --plan")


def test_layer_is_looked_for_in_the_engine() -> None:
    planned = [planned_nodes("block", "trt_moe", "block")]
    layer = Layer("moe", "moe", ("Half",), frozenset({"block"}))
    assert check_layers([layer], planned)[0] == Outcome("block", "trt_moe", None)
    assert "MoE layer is not in the engine" in str(check_layers([], planned)[0].problem)
