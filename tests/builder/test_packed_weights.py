"""--packed-weights: experts from an NVFP4 checkpoint, and what is said where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from typer.testing import CliRunner

from onnx_models import moe_spellings
from onnx_models.moe_spellings import Moe, MoeSpec
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.calibration import nvfp4


def build(folder: Path, *more: str) -> dict[str, Any]:
    """The report, or the error, of a build that stops before TensorRT."""
    arguments = [str(folder / "model.onnx"), "-o", str(folder / "o.engine"), "--target", "rtx-blackwell", "--json"]
    options = ["--max-shapes", "x:2x16x64", "--stop-after", "rewrite", "--packed-weights", str(folder / "weights")]
    output: dict[str, Any] = json.loads(CliRunner().invoke(app, [*arguments, *options, *more]).stdout)
    return output


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    moe_spellings.export(Moe(MoeSpec(), seed), tmp_path / "model.onnx", seed)
    (tmp_path / "weights").mkdir()
    return tmp_path


def save(folder: Path, modules: dict[str, tuple[int, int]]) -> None:
    tensors = {}
    for module, shape in modules.items():
        packed, scales, scale = nvfp4.quantize(torch.randn(shape))
        tensors |= {f"{module}.weight": packed, f"{module}.weight_scale": scales}
        tensors[f"{module}.weight_scale_2"] = torch.full_like(scale, 0.001)
    save_file(tensors, folder / "weights" / "model.safetensors")


def test_experts_are_taken_over(folder: Path) -> None:
    """Their tensor scales are the checkpoint's, not those of the model's weights."""
    sizes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    save(folder, {f"mlp.experts.{expert}.{name}": shape for expert in range(4) for name, shape in sizes.items()})
    report = build(folder)
    assert [entry["decision"] for entry in report["subgraphs"] if entry["kind"] == "moe"] == ["nvfp4_w4a16"]
    written = onnx.load(folder / "o.rewritten.onnx")
    scales = [t for t in written.graph.initializer if t.name.endswith("down_weight.tensor_scale")]
    np.testing.assert_array_equal(numpy_helper.to_array(scales[-1]), np.full(4, 0.001, np.float32))


def test_checkpoint_of_another_model(folder: Path) -> None:
    save(folder, {"model.layers.0.mlp.up_proj": (48, 64)})
    found = build(folder)
    assert found["exit_code"] == errors.USAGE
    assert "holds NVFP4 experts of none of the 1 MoE blocks in the plan" in found["error"]
    assert not (folder / "o.rewritten.onnx").exists()


def test_nothing_takes_them(folder: Path) -> None:
    save(folder, {"mlp.experts.0.up_proj": (48, 64)})
    found = build(folder, "--precision", "bf16")
    assert found["exit_code"] == errors.USAGE
    assert "the plan lowers no MoE block to NVFP4" in found["error"]
