"""Hugging Face directories whose linears are quantized, with the models that they stand for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from checkpoint_formats.writers import Writer

# Of values by FP8's and other writers, to those that layers of a network have.
_SIZE = 0.02


def quantize_directory(
    directory: Path,
    rng: np.random.Generator,
    writer_of: Callable[[str], Writer | None],
    quantization: Mapping[str, Any] | None,
) -> dict[str, torch.Tensor]:
    """Replace weights in a directory's model.safetensors by random ones of the formats that `writer_of` gives for their
    modules; returns the whole state dict that the model has then, in float64 where it is quantized."""
    file = directory / "model.safetensors"
    stored, whole = {}, {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix("weight")
        writer = writer_of(module[:-1]) if name.endswith(".weight") and tensor.dim() == 2 else None
        if writer is None:
            stored[name] = whole[name] = tensor
            continue
        parts, values = writer(rng, *tensor.shape)
        # Smaller scales, as large as a network's.
        factor = 2.0 ** round(np.log2(_SIZE / np.abs(values).max()))
        for part in ("weight_scale_2", "weight_scale_inv", "scales", "SCB", "_weight_scale", "weight_scale"):
            if part in parts and parts[part].dtype in (torch.float32, torch.float16, torch.bfloat16):
                parts[part] = parts[part].float() * factor
                break
        else:
            if "weight_global_scale" not in parts:
                factor = 1.0
            else:
                parts["weight_global_scale"] = parts["weight_global_scale"] / factor
        stored |= {module + part: part_tensor.contiguous() for part, part_tensor in parts.items()}
        whole[name] = torch.from_numpy(values * factor)
    save_file(stored, file, metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return whole
