"""Heads in a checkpoint: the exported head computes what the family's own layers do, step by step over its cache."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_heads import CAPACITY, MTP, VOCABULARY, WIDTH, stepped, write_mtp
from safetensors.torch import load_file, save_file

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import Writer, fp8_blockwise, fp8_per_tensor
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.huggingface import export, export_head
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.model.onnx_file import opened
from trt_nvfp4.builder.model.onnx_session import session

_SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in MTP if family != "glm4_moe"]


@pytest.mark.parametrize("family", ["glm4_moe", *_SLOW])
def test_head_of_a_family(family: str, tmp_path: Path) -> None:
    reference = write_mtp(family, tmp_path / "model")
    export_head(tmp_path / "model", tmp_path / "t.draft.onnx", CacheOptions(CAPACITY, 2, draft="auto"))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (2, 8))
    previous = rng.standard_normal((2, 8, WIDTH)).astype(np.float32)
    expected = reference(torch.from_numpy(ids), torch.from_numpy(previous))
    found = stepped(tmp_path / "t.draft.onnx", ids, previous, [[3, 5], [1, 1], [4, 2]])
    for result, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, whole, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("writer", [fp8_blockwise, fp8_per_tensor], ids=["blocks", "tensors"])
def test_head_of_a_quantized_checkpoint(writer: Writer, rng: np.random.Generator, tmp_path: Path) -> None:
    """As that of the checkpoint with the weights that its quantized ones stand for."""
    write_mtp("mimo", tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "quantized")

    def writer_of(module: str) -> Writer | None:
        return writer if module.endswith("_proj") else None

    settings = {"quant_method": "fp8", **({"weight_block_size": [32, 48]} if writer is fp8_blockwise else {})}
    whole = quantize_directory(tmp_path / "quantized", rng, writer_of, settings)
    state = {name: tensor.float().contiguous() for name, tensor in whole.items()}
    save_file(state, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    ids = rng.integers(0, VOCABULARY, (2, 8))
    previous = rng.standard_normal((2, 8, WIDTH)).astype(np.float32)
    found = []
    for name in ("plain", "quantized"):
        head = tmp_path / f"{name}.draft.onnx"
        export_head(tmp_path / name, head, CacheOptions(CAPACITY, 2, draft="auto"))
        found.append(stepped(head, ids, previous, [[3, 5], [5, 3]]))
    for expected, result in zip(*found, strict=True):
        assert expected.std() > 1e-3
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-3 * expected.std())


def test_hidden_states_of_a_target(tmp_path: Path) -> None:
    """They are transformers' last ones, which the head reads, of all tokens of a step."""
    import transformers

    write_mtp("mimo", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "t.onnx", "generate", CacheOptions(CAPACITY, 2, draft="auto"))
    decoder = OnnxRunner(tmp_path / "t.onnx").decoder
    assert (decoder.hidden_size, decoder.takes_hidden) == (WIDTH, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))
    caches = {name: np.zeros((2, 2, CAPACITY, 16), np.float32) for name in decoder.caches}
    lengths = {"past_length": np.zeros(2, np.int64), "new_length": np.full(2, 5)}
    (found,) = session(opened(tmp_path / "t.onnx")).run(["hidden_states"], {"input_ids": ids, **lengths, **caches})
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_checkpoints_without_a_head_that_fits(tmp_path: Path) -> None:
    write_mtp("mimo", tmp_path)
    options = CacheOptions(CAPACITY, draft="auto")
    state = load_file(file := tmp_path / "model.safetensors")
    name = "model.mtp_layers.0.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in state.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(ModelFaultError, match=r"not like the model's last one \(.*up_proj.*\)"):
        export_head(tmp_path, tmp_path / "t.onnx", options)
    for changed, says in (
        ({"input_proj": torch.ones(WIDTH, WIDTH)}, r"projection.weight is \[64, 64\], expected \[64, 128\]"),
        ({"token_layernorm": None}, r"embedding_norm.weight is missing, expected \[64\]"),
    ):
        ((part, tensor),) = changed.items()
        own = {**state, f"model.mtp_layers.0.{part}.weight": tensor}
        save_file({key: each for key, each in own.items() if each is not None}, file, {"format": "pt"})
        with pytest.raises(ModelFaultError, match=f"its layer for drafts does not fit the model: {says}"):
            export_head(tmp_path, tmp_path / "t.onnx", options)
    save_file({key: tensor for key, tensor in state.items() if "mtp" not in key}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"--draft auto: .* has no layers that predict further tokens"):
        export_head(tmp_path, tmp_path / "t.onnx", options)
