"""Hybrids as they are published: projections and experts quantized, what decays are made of and convolutions not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import FORMATS
from onnx_models.any_causal_lm import made
from trt_nvfp4.builder.export.loading import load_directory
from trt_nvfp4.builder.export.unused_tensors import further_layers

transformers = pytest.importorskip("transformers")

FLOAT32 = ("A_log", "dt_bias")
KEPT = ("in_proj_a", "in_proj_b", "gate", "lm_head", "embed_tokens", "embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvfp4 modelopt", "nvfp4 compressed-tensors", "fp8 per tensor"])
@pytest.mark.parametrize("name", ["Qwen3_5MoeForCausalLM", "NemotronHForCausalLM"])
def test_published_layouts(name: str, kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model, directory = made(name).bfloat16(), tmp_path / "m"
    for part, parameter in model.named_parameters():
        if part.endswith(FLOAT32):
            parameter.data = parameter.data.float() + torch.rand(parameter.shape) / 1000
    model.save_pretrained(directory)
    writer, quantization = FORMATS[kind]
    whole = quantize_directory(
        directory,
        rng,
        lambda module: None if module.endswith(KEPT) else writer,
        {**quantization, "ignore": ["lm_head"]},
    )
    assert further_layers(directory) is None
    stored = load_file(directory / "model.safetensors")
    assert any(tensor.dtype in (torch.uint8, torch.float8_e4m3fn) for tensor in stored.values())
    beside = {f"mtp.layers.0.{part}.weight": torch.ones(64, 64) for part in ("mlp.up_proj", "self_attn.q_proj")}
    save_file(stored | beside, directory / "model.safetensors", metadata={"format": "pt"})
    loaded = load_directory(directory, transformers, trust_remote_code=False)
    assert (note := further_layers(directory)) is not None
    assert '(2 tensors, "mtp.layers.0.mlp.up_proj.weight" for one)' in note
    assert not loaded.absent
    shutil.copytree(directory, tmp_path / "plain")
    plain = {key: tensor if tensor.dtype == torch.float32 else tensor.bfloat16() for key, tensor in whole.items()}
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    expected = type(model).from_pretrained(tmp_path / "plain", dtype="auto").state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if key.endswith(FLOAT32):
            assert value.dtype == torch.float32
            assert torch.equal(value, model.state_dict()[key])
        else:
            torch.testing.assert_close(value.float(), expected[key].float(), rtol=2**-7, atol=0, msg=key)
            assert "conv1d" not in key or value.dtype == torch.bfloat16
