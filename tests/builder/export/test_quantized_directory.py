"""Hugging Face directories with quantized weights are refused before they are loaded without their scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export import huggingface as export

transformers = pytest.importorskip("transformers")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with one layer."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def change(directory: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object] | None = None) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def refusal(directory: Path) -> str:
    with pytest.raises(BuilderError) as raised:
        export.export(directory, directory.with_suffix(".onnx"))
    assert raised.value.exit_code == MODEL_AT_FAULT
    assert not directory.with_suffix(".onnx").exists()
    return str(raised.value)


UP = "model.layers.0.mlp.up_proj."
QUANTIZED = {
    "modelopt fp8": {"weight": torch.zeros(64, 32).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())},
    "deepseek fp8": {"weight": torch.zeros(64, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
    "modelopt int8": {"weight": torch.zeros(64, 32, dtype=torch.int8), "weight_scale": torch.ones(64)},
    "modelopt nvfp4": {"weight": torch.zeros(64, 16, dtype=torch.uint8), "weight_scale_2": torch.ones(())},
    "compressed-tensors nvfp4": {"weight_packed": torch.zeros(64, 16, dtype=torch.uint8)},
    "gptq": {"qweight": torch.zeros(4, 64, dtype=torch.int32), "qzeros": torch.zeros(1, 8, dtype=torch.int32)},
    "only an input scale": {"input_scale": torch.ones(())},
    "scales lost": {"weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("is_stated", [True, False], ids=["stated", "not stated"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights(kind: str, is_stated: bool, llama: Path) -> None:
    tensors = {UP + name: tensor for name, tensor in QUANTIZED[kind].items()}
    change(llama, tensors, {"quant_method": "modelopt"} if is_stated else None)
    message = refusal(llama)
    assert "its weights are quantized" in message
    assert ("by modelopt" if is_stated else "config.json does not say so") in message
    assert all(f'"{key}"' in message for key in tensors)
    assert "give the directory of the original model" in message


@pytest.mark.parametrize("key", ["lora_A.weight", "zero_points", "up_proj.weight.rotation"])
def test_keys_of_a_module_that_it_does_not_use(key: str, llama: Path) -> None:
    """No name says that they are scales, but the module beside them computes with them."""
    change(llama, {(UP if "." not in key else "model.layers.0.mlp.") + key: torch.ones(4)})
    if key == "zero_points":
        assert f'"{UP}zero_points"' in refusal(llama)
    else:  # modules that the model does not have
        export.export(llama, llama.with_suffix(".onnx"))


def test_heads_that_the_model_lacks_and_tables_that_it_computes(llama: Path) -> None:
    change(llama, {"score.weight": torch.ones(2, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert export.export(llama, llama.with_suffix(".onnx")).is_file()
