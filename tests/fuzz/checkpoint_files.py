"""Quantized directories of each format, shards and engines, all small, and what reads them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from checkpoint_formats.writers import FORMATS
from trt_nvfp4.builder.export.checkpoints.directory import quantized_directory
from trt_nvfp4.builder.generate.open import open_runner
from trt_nvfp4.builder.report import inspection
from trt_nvfp4.builder.tensorrt.load import load_engine
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint

N, K = 32, 64
MODULES = ("model.layers.0.mlp.gate_proj.", "model.layers.0.mlp.experts.1.up_proj.")
INDEX = "model.safetensors.index.json"


def read_directory(folder: Path) -> None:
    """All that a build reads of a quantized directory."""
    found = quantized_directory(folder)
    if found is None:
        return
    for value in found.state_dict().values():
        value[...]
    found.fp8()
    for value in found.deferred(torch.bfloat16).values():
        value[...]
    checkpoint = NVFP4Checkpoint(folder, of_model=True)
    for module in checkpoint:
        checkpoint.tensor_scales(module)
        checkpoint[module]


def _engine(folder: Path) -> None:
    for read in (inspection.inspect, open_runner, load_engine):
        read(folder / "foreign.engine")


def readers() -> dict[str, tuple[str, Callable[[Path], object]]]:
    """By the name of a kind: the file that is changed, and what reads it in its folder."""
    found: dict[str, tuple[str, Callable[[Path], object]]] = {}
    for number, name in enumerate(FORMATS):
        place = f"quantized-{number}"

        def read(folder: Path, place: str) -> None:
            read_directory(folder / place)

        for file in ("config.json", "model.safetensors"):
            found[f"{name}: {file}"] = (f"{place}/{file}", partial(read, place=place))
    for file in (INDEX, "one.safetensors", "two.safetensors", "hf_quant_config.json"):
        found[f"shards: {file}"] = (f"shards/{file}", lambda folder: read_directory(folder / "shards"))
    for file in ("foreign.engine", "foreign.report.json"):
        found[f"engine: {file}"] = (file, _engine)
    return found


def write(folder: Path) -> None:
    """Writes a sound file of each."""
    rng = np.random.default_rng(0)
    for number, (writer, quantization) in enumerate(FORMATS.values()):
        tensors = {}
        for module in MODULES:
            parts, _ = writer(rng, N, K)
            tensors |= {module + role: tensor.contiguous() for role, tensor in parts.items()}
        tensors["model.norm.weight"] = torch.ones(K)
        for of in "kv":
            tensors[f"model.layers.0.self_attn.{of}_scale"] = torch.tensor(0.5)
        (place := folder / f"quantized-{number}").mkdir()
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        stated = {**quantization, "group_size": 32, "config_groups": {"group_0": {"targets": ["Linear"]}}}
        stated = stated if "gptq" in str(quantization) else dict(quantization)
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": stated}))
    _write_shards(folder / "shards", rng)
    (folder / "foreign.engine").write_bytes(b"ftrt" + bytes(rng.integers(0, 256, 4096).tolist()))
    report = {"backend": "tensorrt", "versions": {"tensorrt": "10.13"}, "target": "ada", "files": {}}
    (folder / "foreign.report.json").write_text(json.dumps(report))


def _write_shards(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    places = {}
    for name, module in zip(("one", "two"), MODULES, strict=True):
        parts, _ = FORMATS["nvfp4 modelopt"][0](rng, N, K)
        tensors = {module + role: tensor.contiguous() for role, tensor in parts.items()}
        save_file(tensors, folder / f"{name}.safetensors")
        places |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
