"""Checkpoints of both conventions, written here as their tools lay them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trt_nvfp4.calibration import nvfp4
from trt_nvfp4.calibration.checkpoint import load_nvfp4
from trt_nvfp4.calibration.errors import CalibrationError

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def quantized(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return nvfp4.quantize(torch.randn(24, 48, generator=torch.Generator().manual_seed(seed)))


def modelopt(name: str, seed: int) -> dict[str, torch.Tensor]:
    packed, block_scales, scale = quantized(seed)
    return {
        f"{name}.weight": packed,
        f"{name}.weight_scale": block_scales,
        f"{name}.weight_scale_2": scale,
        f"{name}.input_scale": torch.tensor(0.125),
    }


def compressed_tensors(name: str, seed: int) -> dict[str, torch.Tensor]:
    packed, block_scales, scale = quantized(seed)
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": block_scales,
        f"{name}.weight_global_scale": scale.reciprocal().reshape(1),
        f"{name}.input_global_scale": torch.tensor([8.0]),
    }


@pytest.mark.parametrize("convention", [modelopt, compressed_tensors])
def test_both_conventions_give_the_same_weights_bit_by_bit(convention: object, tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**convention(UP, seed), "model.norm.weight": torch.ones(4)}, file)  # type: ignore[operator]
    checkpoint = load_nvfp4(file)
    assert list(checkpoint) == [UP]
    weight = checkpoint[UP]
    packed, block_scales, scale = quantized(seed)
    assert torch.equal(weight.packed, packed)
    assert torch.equal(weight.block_scales.view(torch.uint8), block_scales.view(torch.uint8))
    torch.testing.assert_close(weight.tensor_scale, scale, rtol=2e-7, atol=0)
    assert weight.input_tensor_scale is not None
    assert weight.input_tensor_scale.item() == 0.125


@pytest.mark.parametrize("with_index", [True, False])
def test_folders_of_several_files(with_index: bool, tmp_path: Path, seed: int) -> None:
    """A module's tensors may lie in different files, and the conventions side by side."""
    up, down = modelopt(UP, seed), compressed_tensors(DOWN, seed + 1)
    first = {**up, f"{DOWN}.weight_packed": down.pop(f"{DOWN}.weight_packed")}
    del first[f"{UP}.input_scale"]
    save_file(first, tmp_path / "a.safetensors")
    save_file(down, tmp_path / "b.safetensors")
    if with_index:
        weight_map = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(down, "b.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = load_nvfp4(tmp_path)
    assert sorted(checkpoint) == sorted([UP, DOWN])
    assert torch.equal(checkpoint[DOWN].packed, quantized(seed + 1)[0])
    assert checkpoint[UP].input_tensor_scale is None
    with pytest.raises(KeyError):
        checkpoint["model.norm"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{UP}.weight": torch.ones(24, 24)}, "uint8 values and float8_e4m3fn block scales, found torch.float32"),
        ({f"{UP}.weight": torch.ones(24, 20, dtype=torch.uint8)}, r"found \(24, 20\) and \(24, 3\)"),
        ({f"{UP}.weight_scale_2": torch.zeros(())}, "weight_scale_2 must be one positive, finite number"),
        ({f"{UP}.weight_scale_2": torch.ones(3)}, r"found shape \(3,\)"),
        ({f"{UP}.weight_scale": -torch.ones(24, 3)}, "found torch.uint8 and torch.float32"),
        ({f"{UP}.weight_scale": (-torch.ones(24, 3)).to(torch.float8_e4m3fn)}, "negative or NaN block scales"),
    ],
)
def test_tensors_that_are_not_nvfp4(change: dict[str, torch.Tensor], message: str, tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**modelopt(UP, seed), **change}, file)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_nvfp4(file)[UP]
    assert UP in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path: Path, seed: int) -> None:
    tensors = modelopt(UP, seed)
    del tensors[f"{UP}.weight"]
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(CalibrationError, match=f"tensor {UP}.weight is missing"):
        load_nvfp4(tmp_path)[UP]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no .*safetensors file in this folder"):
        load_nvfp4(tmp_path)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a header")
    with pytest.raises(CalibrationError, match=r"broken.safetensors: not a safetensors file"):
        load_nvfp4(broken)
    with pytest.raises(CalibrationError, match=r"absent.safetensors: not a safetensors file"):
        load_nvfp4(tmp_path / "absent.safetensors")
