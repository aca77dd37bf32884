"""Denoisers with published NVFP4 weights, written here without our reader: their values, and their bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvfp4_reference import quantize, tile
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")

from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.components.diffusion.runs import PictureOptions
from trt_nvfp4.builder.components.diffusion.source import of_pipeline
from trt_nvfp4.builder.components.parts import packed_of
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError

from .pipelines import FAMILIES, saved

FILE = "diffusion_pytorch_model.safetensors"
#: Authors' name of a layer -> diffusers' names of the layers that it is.
FUSED = {
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.out": ("attention.to_out.0",),
}
Expected = dict[str, dict[str, torch.Tensor]]


def written(folder: Path, layout: str, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], Expected]:
    """Quantizes the linears of a Z-Image's layers in place; returns the values that files stand for by diffusers'
    names, and what ModelOpt would write of them."""
    state = load_file(folder / FILE)
    layers = sorted({name.rpartition(".attention.")[0] for name in state if name.endswith("attention.to_q.weight")})
    expected: Expected = {}
    stored: dict[str, torch.Tensor] = {}
    for layer in layers:
        feed_forward = {f"feed_forward.w{number}": (f"feed_forward.w{number}",) for number in (1, 2, 3)}
        for fused, names in {**FUSED, **feed_forward}.items():
            parts = [state.pop(f"{layer}.{name}.weight") for name in names]
            found = quantize(torch.cat(parts).numpy())
            of_input = float(rng.uniform(0.01, 0.1)) if layout == "modelopt" and rng.random() < 0.5 else None
            packed = found.codes[:, 0::2] | found.codes[:, 1::2] << 4
            values = torch.from_numpy(found.values.astype(np.float32))
            rows = np.cumsum([0, *map(len, parts)])
            for name, start, end in zip(names, rows, rows[1:], strict=False):
                state[f"{layer}.{name}.weight"] = values[start:end]
                expected[f"{layer}.{name}"] = {
                    "weight": torch.from_numpy(packed[start:end]),
                    "weight_scale": torch.from_numpy(found.block_scales[start:end]).view(torch.float8_e4m3fn),
                    "weight_scale_2": torch.tensor(found.tensor_scale),
                    **({} if of_input is None else {"input_scale": torch.tensor(of_input)}),
                }
                if layout == "modelopt":
                    stored |= {f"{layer}.{name}.{key}": tensor for key, tensor in expected[f"{layer}.{name}"].items()}
            if layout == "comfyui":
                scales = torch.from_numpy(tile(found.block_scales)).view(torch.float8_e4m3fn)
                stored |= {
                    f"{layer}.{fused}.weight": torch.from_numpy(found.codes[:, 0::2] << 4 | found.codes[:, 1::2]),
                    f"{layer}.{fused}.weight_scale": scales,
                    f"{layer}.{fused}.weight_scale_2": torch.tensor(found.tensor_scale),
                    f"{layer}.{fused}.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
                }
    plain = {name: tensor for name, tensor in state.items() if name.removesuffix(".weight") not in expected}
    if layout == "comfyui":
        plain = {authors(name): tensor for name, tensor in plain.items()}
        stored = {f"model.diffusion_model.{name}": tensor for name, tensor in stored.items()}
    (folder / FILE).unlink()
    save_file({key: tensor.contiguous() for key, tensor in (stored | plain).items()}, folder / f"{layout}.safetensors")
    return state, expected


def authors(name: str) -> str:
    for new, old in (("all_final_layer.2-1.", "final_layer."), ("all_x_embedder.2-1.", "x_embedder.")):
        name = name.replace(new, old)
    for new, old in (("to_out.0.bias", "out.bias"), ("norm_k.weight", "k_norm.weight"), ("norm_q.", "q_norm.")):
        name = name.replace(f".attention.{new}", f".attention.{old}")
    return f"model.diffusion_model.{name}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["modelopt", "comfyui"])
def test_published_weights_keep_their_bytes(layout: str, rng: np.random.Generator, seed: int, tmp_path: Path) -> None:
    """Their inputs have the scales that the files have, and none where these lack one."""
    saved("z_image", tmp_path / "model", seed=seed)
    values, expected = written(tmp_path / "model" / "transformer", layout, rng)
    transformer = open_pipeline(tmp_path / "model").transformer
    for name, tensor in transformer.state_dict().items():
        torch.testing.assert_close(tensor, values[name], rtol=1e-6, atol=0)
    source = of_pipeline(tmp_path / "model", PictureOptions.parse(FAMILIES["z_image"][1], 1, None))
    (part,) = (part for part in source.parts if part.name == "transformer")
    part.export(source.name, tmp_path)
    with safe_open(packed_of(tmp_path, "transformer"), "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    flat = {f"module.module.{name}.{key}": tensor for name, parts in expected.items() for key, tensor in parts.items()}
    assert found.keys() == flat.keys()
    for name, tensor in flat.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert open_pipeline(tmp_path / "model", without_weights=["transformer"]).transformer.dtype == torch.float32


def drop_scale(tensors: dict[str, Any], layer: str) -> None:
    tensors[f"{layer}.weight_scale"] = tensors[f"{layer}.weight_scale"][:-1].contiguous()


def zero_scale(tensors: dict[str, Any], layer: str) -> None:
    tensors[f"{layer}.weight_scale_2"] = torch.zeros(())


def other_format(tensors: dict[str, Any], layer: str) -> None:
    tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": "mxfp8"}).encode()), dtype=torch.uint8)


def more(tensors: dict[str, Any], layer: str) -> None:
    tensors["another.weight"] = torch.zeros(3)


def fewer(tensors: dict[str, Any], layer: str) -> None:
    del tensors["cap_embedder.1.bias"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_scale, r"to_q.weight_scale must hold \[96, 6\] block scales"),
        (zero_scale, r"to_q.weight_scale_2 must be one positive, finite number"),
        (other_format, r"to_q is in the format 'mxfp8', expected nvfp4"),
        (more, r"hold 1 tensors that ZImageTransformer2DModel lacks, another.weight for one"),
        (fewer, r"lack 1 of its weights, cap_embedder.1.bias for one"),
    ],
)
def test_files_that_do_not_fit(change: Any, message: str, rng: np.random.Generator, tmp_path: Path) -> None:
    saved("z_image", tmp_path)
    written(tmp_path / "transformer", "modelopt", rng)
    file = tmp_path / "transformer" / "modelopt.safetensors"
    tensors = load_file(file)
    change(tensors, "layers.0.attention.to_q")
    save_file(tensors, file)
    with pytest.raises(BuilderError, match=message) as caught:
        open_pipeline(tmp_path)
    assert caught.value.exit_code == MODEL_AT_FAULT
