"""--set packed-weights: weights from an NVFP4 checkpoint, and what is said where it has none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from safetensors.torch import save_file

from onnx_models import moe_spellings, zoo
from onnx_models.moe_spellings import Moe, MoeSpec
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.accuracy.budget import Score
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.calibration.samples.samples import input_specs, save_sample
from trt_nvfp4.common import nvfp4


def build(folder: Path, *more: str) -> dict[str, Any]:
    """The report, or the error, of a build that stops before TensorRT."""
    arguments = [str(folder / "model.onnx"), "-o", str(folder / "o.engine"), "--target", "rtx-blackwell", "--json"]
    options = ["--stop-after", "rewrite", "--set", f"packed-weights={folder / 'weights'}"]
    output: dict[str, Any] = json.loads(CliRunner().invoke(app, [*arguments, *options, *more]).stdout)
    return output


@pytest.fixture
def moe(tmp_path: Path, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with a model, and the weights of its MoE block as checkpoints call them."""
    model = Moe(MoeSpec(), seed)
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    return tmp_path, {
        f"mlp.experts.{number}.{name}_proj": getattr(expert, name).weight.detach()
        for number, expert in enumerate(model.experts)
        for name in ("gate", "up", "down")
    }


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The same of a decoder's MLPs."""
    model, draw = zoo.build("llama")
    zoo.export(model, draw(0), tmp_path / "model.onnx", "torchscript")
    mlps = {
        path: module.weight.detach() for path, module in model.named_modules() if ".mlp." in path and "proj" in path
    }
    return tmp_path, mlps


Model = tuple[Path, dict[str, torch.Tensor]]


def save(folder: Path, modules: dict[str, torch.Tensor], **scales: float) -> None:
    """With tensor scales that this project would not choose."""
    tensors = {}
    for module, weight in modules.items():
        scale = torch.tensor(0.001)
        packed, block_scales, _ = nvfp4.quantize(weight.contiguous(), scale)
        tensors |= {f"{module}.weight": packed, f"{module}.weight_scale": block_scales}
        tensors |= {f"{module}.weight_scale_2": scale, **{f"{module}.{k}": torch.tensor(v) for k, v in scales.items()}}
    (folder / "weights").mkdir()
    save_file(tensors, folder / "weights" / "model.safetensors")


def scales_of(folder: Path, kind: str) -> list[np.ndarray]:
    written = onnx.load(folder / "o.rewritten.onnx")
    return [numpy_helper.to_array(t) for t in written.graph.initializer if t.name.endswith(f"{kind}_tensor_scale")]


def test_experts_are_taken_over(moe: Model) -> None:
    """Their tensor scales are the checkpoint's, not those of the model's weights."""
    folder, weights = moe
    save(folder, weights)
    report = build(folder, "--max-shapes", "x:2x16x64")
    assert [entry["decision"] for entry in report["subgraphs"] if entry["kind"] == "moe"] == ["nvfp4_w4a16"]
    written = onnx.load(folder / "o.rewritten.onnx")
    scales = [t for t in written.graph.initializer if t.name.endswith("down_weight.tensor_scale")]
    np.testing.assert_array_equal(numpy_helper.to_array(scales[-1]), np.full(4, 0.001, np.float32))


def test_published_activation_scales(llama: Model) -> None:
    """W4A4 without calibration data, and nothing to warn of."""
    folder, weights = llama
    save(folder, weights, input_scale=0.002)
    report = build(folder)
    found = [entry for entry in report["subgraphs"] if entry["kind"] == "gated_mlp"]
    assert [entry["decision"] for entry in found] == ["nvfp4_w4a4"] * zoo.LAYERS
    assert {entry["activations"] for entry in found} == {"NVFP4, calibrated scales"}
    assert report["warnings"] == []
    np.testing.assert_allclose(scales_of(folder, "input") + scales_of(folder, "hidden"), 0.002, rtol=2e-7)


@pytest.mark.parametrize("left", ["layers.1.", "layers.1.mlp.down_proj"])
def test_layers_left_in_16_bits(llama: Model, left: str) -> None:
    """Whole, or in part."""
    folder, weights = llama
    save(folder, {name: weight for name, weight in weights.items() if left not in name}, input_scale=0.002)
    report = build(folder)
    decisions = [entry["decision"] for entry in report["subgraphs"] if entry["kind"] == "gated_mlp"]
    assert decisions == ["nvfp4_w4a4", "nvfp4_w4a16"]
    lacking, uncalibrated = sorted(report["warnings"])
    assert "lacks weights of model.layers.1.mlp: quantized from the model's own" in lacking
    assert "no calibration data, so activations are not quantized" in uncalibrated


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            [],
            "holds no NVFP4 weights of the 2 subgraphs in the plan, such as 'model.layers.0.mlp', but those of others,",
        ),
        (["--precision", "bf16"], "the plan has no NVFP4 plugin"),
        (["--recipe", "awq", "--calib-data", "x.npz"], "recipe 'awq' scales channels of weights"),
    ],
)
def test_nothing_takes_them(options: list[str], text: str, llama: Model) -> None:
    folder, _ = llama
    save(folder, {"vision.blocks.0.fc1": torch.randn(48, 64)})
    np.savez(folder / "x.npz", x=np.ones((1, 4), np.int64))
    found = build(folder, *[str(folder / option) if option.endswith(".npz") else option for option in options])
    assert found["exit_code"] == errors.USAGE
    assert text in found["error"]
    assert not (folder / "o.rewritten.onnx").exists()


def test_budgets_measure_the_weights_that_are_taken(llama: Model, rng: np.random.Generator) -> None:
    """And not the model's own, quantized here, which are others."""
    folder, weights = llama
    save(folder, weights)
    original = folder / "model.onnx"
    samples = random_samples(input_specs(original), vocabulary(original), 4, rng, {})
    (folder / "samples").mkdir()
    for index, sample in enumerate(samples):
        save_sample(folder / "samples" / f"{index}.npz", sample)
    report = build(
        folder, "--calib-data", str(folder / "samples"), "--accuracy-budget", "sqnr>=0", "--require", "nvfp4"
    )
    assert "budget" in report, report
    before, after = session(original), session(folder / "o.rewritten.onnx")
    names = [output.name for output in before.get_outputs()]
    score = Score("sqnr")
    expected, found = (dict(zip(names, runner.run(None, samples[1]), strict=True)) for runner in (before, after))
    score.add(samples[1], expected, found)
    assert report["budget"]["achieved"] == pytest.approx(score.value)
