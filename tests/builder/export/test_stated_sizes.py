"""Configurations that describe more than their directory holds, or than any model has, are refused first."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export.checkpoints import stated_size
from trt_nvfp4.builder.export.decoders import end_tokens
from trt_nvfp4.builder.export.expected_inputs import expected_inputs
from trt_nvfp4.builder.export.huggingface import load_model, longest_sequence
from trt_nvfp4.builder.model.decoder_contract import CacheOptions


@pytest.fixture(params=["safetensors", "bin"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(tmp_path)
    if request.param == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    yield tmp_path
    hooks = torch.nn.modules.module._global_module_registration_hooks
    assert not hooks, "nothing watches other models"


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def refused(directory: Path, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelFaultError, match=words) as failure:
        load_model(directory)
    assert str(directory / "config.json") in str(failure.value)
    assert time.monotonic() - started < 10


def test_as_it_is(directory: Path) -> None:
    model, _ = load_model(directory)
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize("entry", ["num_hidden_layers", "num_attention_heads", "num_labels"])
def test_more_parts_than_any_model_has(directory: Path, entry: str) -> None:
    change(directory / "config.json", **{entry: 10**9})
    refused(directory, f"{entry} is 1000000000, and no model has more than 100000; correct it")
    for read in (lambda: expected_inputs(directory, "auto", CacheOptions()), lambda: longest_sequence(directory)):
        with pytest.raises(BuilderError, match=f"{entry} is 1000000000"):
            read()


def test_more_modules_than_any_model_has(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stated_size, "MOST_MODULES", 1000)
    change(directory / "config.json", num_hidden_layers=90_000)
    refused(directory, "a network of more than 1000 modules")
    with pytest.raises(BuilderError, match="a network of more than 1000 modules"):
        expected_inputs(directory, "auto", CacheOptions())


@pytest.mark.parametrize("entry", ["vocab_size", "intermediate_size", "hidden_size"])
def test_larger_than_what_it_holds(directory: Path, entry: str) -> None:
    change(directory / "config.json", **{entry: 1 << 30})
    refused(directory, r"describes a model of \d+ GB, but the directory holds 0.0")


def test_files_of_weights_in_another_folder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the index names."""
    monkeypatch.setattr(stated_size, "_ALWAYS", 0)
    monkeypatch.setattr(stated_size, "_LARGEST_RATIO", 2)
    config = transformers.LlamaConfig.from_pretrained(directory)
    (weights,) = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    (directory / "sub").mkdir()
    weights.rename(directory / "sub" / weights.name)
    with pytest.raises(BuilderError, match="but the directory holds"):
        stated_size.check_size(directory, transformers.LlamaForCausalLM, config)
    index = directory / f"{weights.name}.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": f"sub/{weights.name}"}}))
    stated_size.check_size(directory, transformers.LlamaForCausalLM, config)


@pytest.mark.parametrize(
    ("stated", "found"),
    [(5, [5]), ([1, 2], [1, 2]), (-1, []), ([1 << 70, 3, "x", True, 2.5], [3]), ("x", []), ({}, []), ([[1]], [])],
)
def test_tokens_that_end_a_text(stated: Any, found: list[int]) -> None:
    class Model:
        generation_config = None
        config = type("Config", (), {"eos_token_id": stated})

    assert end_tokens(Model) == found
