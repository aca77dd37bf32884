"""A large model is built from its directory without a copy of its weights, and becomes what it becomes with one."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import FORMATS
from trt_nvfp4.builder.export import deferred, torch_module
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}


def plain(folder: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def experts(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)


def of_format(name: str, folder: Path, rng: np.random.Generator) -> None:
    writer, quantization = FORMATS[name]
    chosen = {"nvfp4 modelopt": (".experts.", "self_attn"), "fp8 per channel": (".experts.", "self_attn")}[name]
    quantize_directory(
        folder, rng, lambda module: writer if any(part in module for part in chosen) else None, quantization
    )


def rewritten(directory: Path, folder: Path, **options: Any) -> dict[str, str]:
    """The files of a run, by a digest of what is in them."""
    folder.mkdir(exist_ok=True)
    request = Request(
        model=directory,
        target=find_target("rtx-blackwell"),
        output=folder / "o.engine",
        task="generate",
        recipe="mse",
        **{"stop_after": "rewrite", **options},
    )
    report = pipeline.run(request)
    assert ("exported model" in report.files) == (folder / "o.onnx").exists()
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("kind", ["plain", "nvfp4 modelopt", "fp8 per channel"])
def test_rewritten_model(kind: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    (plain if kind == "plain" else experts)(directory)
    if kind in FORMATS:
        of_format(kind, directory, rng)
    whole = rewritten(directory, tmp_path / "whole")
    monkeypatch.setattr(deferred, "SMALL", 0)
    monkeypatch.setattr(torch_module, "EXTERNAL_DATA_BYTES", 0)
    # An earlier export would pass for the engine's own.
    shutil.copytree(tmp_path / "whole", tmp_path / "by-reference", ignore=lambda _, names: set(names) - {"o.onnx"})
    found = rewritten(directory, tmp_path / "by-reference")
    kept = {"o.rewritten.onnx", "o.rewritten.onnx.data", "o.plan.yaml"}
    assert {name: found[name] for name in kept} == {name: whole[name] for name in kept}
    assert "o.onnx" in whole
    assert not {name for name in found if name.startswith("o.onnx")}
