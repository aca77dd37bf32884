"""Checkpoints of both conventions, written here as their tools lay them out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError

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


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("convention", [modelopt, compressed_tensors])
def test_both_conventions_give_the_same_weights_bit_by_bit(convention: object, tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**convention(UP, seed), "model.norm.weight": torch.ones(4)}, file)  # type: ignore[operator]
    checkpoint = NVFP4Checkpoint(file)
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
        index(tmp_path, weight_map)
    checkpoint = NVFP4Checkpoint(tmp_path)
    assert sorted(checkpoint) == sorted([UP, DOWN])
    assert torch.equal(checkpoint[DOWN].packed, quantized(seed + 1)[0])
    assert checkpoint[UP].input_tensor_scale is None
    with pytest.raises(KeyError):
        checkpoint["model.norm"]


def test_a_name_that_two_modules_may_have_is_none(tmp_path: Path, seed: int) -> None:
    """The language model's and the vision tower's: neither may stand for the other."""
    other = UP.replace("model", "vision", 1)
    save_file({**modelopt(UP, seed), **modelopt(other, seed + 1)}, tmp_path / "m.safetensors")
    checkpoint = NVFP4Checkpoint(tmp_path)
    assert checkpoint.module("0.mlp.up_proj") is None
    assert checkpoint.module(f"language.{UP}") == UP
    assert checkpoint.module(other) == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{UP}.weight": torch.ones(24, 24)}, "uint8 values and float8_e4m3fn block scales, found torch.float32"),
        ({f"{UP}.weight": torch.ones(24, 20, dtype=torch.uint8)}, r"found \(24, 20\) and \(24, 3\)"),
        ({f"{UP}.weight_scale_2": torch.zeros(())}, "weight_scale_2 must be one positive, finite number"),
        ({f"{UP}.weight_scale_2": torch.ones(3)}, r"found shape \(3,\)"),
        ({f"{UP}.weight_scale_2": torch.ones(0)}, r"found shape \(0,\) of torch.float32"),
        ({f"{UP}.weight_scale_2": torch.ones((), dtype=torch.int64)}, r"found shape \(\) of torch.int64"),
        ({f"{UP}.weight_scale_2": torch.tensor(float("nan"))}, "must be one positive, finite number, found nan"),
        ({f"{UP}.input_scale": torch.ones(2)}, r"input_scale must be one .*, found shape \(2,\)"),
        ({f"{UP}.weight_scale": -torch.ones(24, 3)}, "found torch.uint8 and torch.float32"),
        ({f"{UP}.weight_scale": (-torch.ones(24, 3)).to(torch.float8_e4m3fn)}, "negative or NaN block scales"),
        ({f"{UP}.weight_scale": torch.full((24, 3), torch.nan).to(torch.float8_e4m3fn)}, "negative or NaN block"),
    ],
)
def test_tensors_that_are_not_nvfp4(change: dict[str, torch.Tensor], message: str, tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**modelopt(UP, seed), **change}, file)
    with pytest.raises(CalibrationError, match=message) as caught:
        NVFP4Checkpoint(file)[UP]
    assert UP in str(caught.value)


UNUSABLE = (1e-42, 0.0, -2.0, float("inf"), float("nan"))


@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize("convention", [modelopt, compressed_tensors])
def test_scales_that_are_not_positive_and_finite(convention: Any, value: float, tmp_path: Path, seed: int) -> None:
    """Those of activations are left out; that of a weight is an error, but where all of its values are 0."""
    file, tensors = tmp_path / "model.safetensors", convention(UP, seed)
    (of_input,) = (name for name in tensors if "input" in name)
    (of_weight,) = (name for name in tensors if name.endswith(("scale_2", "weight_global_scale")))
    (values,) = (name for name in tensors if tensors[name].dtype == torch.uint8)
    usable = value > 0 and value != float("inf") and convention is modelopt
    save_file({**tensors, of_input: torch.tensor([value])}, file)
    checkpoint = NVFP4Checkpoint(file)
    assert (checkpoint.tensor_scales(UP)[1] is not None) == usable
    assert usable or list(checkpoint.unusable) == [of_input]
    save_file({**tensors, of_weight: torch.tensor([value])}, file)
    if not usable:
        found = re.escape(f"{torch.tensor(value).item():g}")
        with pytest.raises(
            CalibrationError, match=f"{of_weight} must be one positive, finite number.*, found {found}$"
        ):
            NVFP4Checkpoint(file).tensor_scales(UP)
    for zeros in ({values: tensors[values] & 0x88}, {f"{UP}.weight_scale": torch.zeros(24, 3).to(torch.float8_e4m3fn)}):
        save_file({**tensors, of_weight: torch.tensor([value]), **zeros}, file)
        weight = NVFP4Checkpoint(file)[UP]
        assert not nvfp4.dequantize(weight.packed, weight.block_scales, weight.tensor_scale).any()


@pytest.mark.parametrize("with_index", [True, False])
def test_a_truncated_file_is_named(with_index: bool, tmp_path: Path, seed: int) -> None:
    whole, cut = modelopt(UP, seed), modelopt(DOWN, seed)
    save_file(whole, tmp_path / "a.safetensors")
    save_file(cut, tmp_path / "b.safetensors")
    content = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content[: len(content) * 2 // 3])
    if with_index:
        index(tmp_path, {**dict.fromkeys(whole, "a.safetensors"), **dict.fromkeys(cut, "b.safetensors")})
    with pytest.raises(CalibrationError, match=r"b\.safetensors: .*incomplete one \(then download it again\)"):
        NVFP4Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"not JSON", b"\xff"]
)
def test_an_index_that_is_none(content: bytes, tmp_path: Path, seed: int) -> None:
    save_file(modelopt(UP, seed), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CalibrationError, match=r"index.json: (expected an object with a weight_map|not JSON)"):
        NVFP4Checkpoint(tmp_path)


def test_an_index_and_files_that_differ(tmp_path: Path, seed: int) -> None:
    tensors = modelopt(UP, seed)
    save_file(tensors, tmp_path / "a.safetensors")
    index(tmp_path, {**dict.fromkeys(tensors, "a.safetensors"), "model.norm.weight": "b.safetensors"})
    with pytest.raises(CalibrationError, match=r"index.json: lists b.safetensors, not found .*\(1 of 2 files\)"):
        NVFP4Checkpoint(tmp_path)
    index(tmp_path, dict.fromkeys([*tensors, "model.norm.weight"], "a.safetensors"))
    with pytest.raises(CalibrationError, match=r"index.json: tensor model.norm.weight is not in a.safetensors"):
        NVFP4Checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path, seed: int) -> None:
    """An index says which of them holds; without one they may differ, and none is taken."""
    tensors, other = modelopt(UP, seed), modelopt(UP, seed + 1)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    with pytest.raises(CalibrationError, match=rf"tensor {UP}\.\w+ is in a.safetensors and in b.safetensors"):
        NVFP4Checkpoint(tmp_path)
    index(tmp_path, dict.fromkeys(tensors, "a.safetensors"))
    assert torch.equal(NVFP4Checkpoint(tmp_path)[UP].packed, tensors[f"{UP}.weight"])


def test_conventions_that_are_unknown_or_mixed_in_a_module(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"{UP}.weight": torch.ones(2, 2), f"{UP}.weight_scale_inv": torch.ones(1)}, file)
    with pytest.raises(CalibrationError, match=r"no NVFP4 weights: .*, found weight, weight_scale_inv$"):
        NVFP4Checkpoint(file)
    save_file({**modelopt(DOWN, seed), **modelopt(UP, seed), **compressed_tensors(UP, seed)}, file)
    with pytest.raises(CalibrationError, match=f"{UP} has weight_scale_2 .* and weight_global_scale"):
        NVFP4Checkpoint(file)


def test_a_missing_tensor_is_named(tmp_path: Path, seed: int) -> None:
    tensors = modelopt(UP, seed)
    del tensors[f"{UP}.weight"]
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(CalibrationError, match=f"tensor {UP}.weight is missing"):
        NVFP4Checkpoint(tmp_path)[UP]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no .*safetensors file in this folder"):
        NVFP4Checkpoint(tmp_path)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a header")
    with pytest.raises(CalibrationError, match=r"broken.safetensors: not a safetensors file"):
        NVFP4Checkpoint(broken)
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    with pytest.raises(CalibrationError, match=r"broken.safetensors: a Git LFS pointer in place of the file"):
        NVFP4Checkpoint(broken)
    with pytest.raises(CalibrationError, match=r"absent.safetensors: no such file or folder"):
        NVFP4Checkpoint(tmp_path / "absent.safetensors")
