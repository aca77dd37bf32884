"""The command: what it prints where, and its messages and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.cli.generate import app, printable
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE
from trt_nvfp4.builder.export import huggingface

TESTS = Path(__file__).parents[2]
TOKENIZER = TESTS / "trained_models" / "llama"


@pytest.fixture
def model(tmp_path: Path, seed: int) -> tuple[Path, TinyDecoder]:
    """A tiny decoder with a tokenizer beside it."""
    tiny = TinyDecoder(np.random.default_rng(seed), vocab=_vocabulary())
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return tiny.save(tmp_path / "model.onnx"), tiny


def _vocabulary() -> int:
    return int(json.loads((TOKENIZER / "config.json").read_text())["vocab_size"])


def test_text_goes_to_stdout_and_timings_to_stderr(model: tuple[Path, TinyDecoder]) -> None:
    path, tiny = model
    prompts = ["--prompt", "A story", "--prompt", "b", "--max-new-tokens", "6"]
    ran = CliRunner().invoke(app, [str(path), *prompts, "--json"])
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    for generation in found["generations"]:
        assert generation["token_ids"] == tiny.greedy(generation["prompt_ids"], 6)
    assert "tokens/s" in ran.stderr
    plain = CliRunner().invoke(app, [str(path), *prompts])
    assert plain.stdout == "".join(printable(generation["text"]) + "\n" for generation in found["generations"])
    streamed = CliRunner().invoke(app, [str(path), *prompts[:2], *prompts[4:], "--stream"])
    assert streamed.stdout == printable(found["generations"][0]["text"]) + "\n"


def test_a_full_cache_is_a_warning(model: tuple[Path, TinyDecoder]) -> None:
    ran = CliRunner().invoke(app, [str(model[0]), "--prompt", "A", "--max-new-tokens", "400"])
    assert ran.exit_code == 0
    assert "the cache of 24 tokens is full" in ran.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", "word " * 40], USAGE, "the caches hold 24"),
        (["--prompt", "a", "--tokenizer", "/nowhere"], USAGE, "no tokenizer is there"),
        (["--prompt", "a"] * 5, USAGE, "takes at most 4 at once"),
        (["--prompt", "a", "--chat"], USAGE, "no chat template"),
        (["--prompt", "a\udcff"], USAGE, "not UTF-8 text, from character 2 on"),
        (["--prompt", "a", "--top-k", "3"], USAGE, "greedy decoding ignores it"),
        (["--prompt", "a", "--prompt", "b", "--stream"], USAGE, "would mix"),
    ],
)
def test_bad_input_is_one_message(model: tuple[Path, TinyDecoder], arguments: list[str], code: int, words: str) -> None:
    ran = CliRunner().invoke(app, [str(model[0]), *arguments])
    assert ran.exit_code == code
    assert not ran.stdout
    assert ran.stderr.count("error: ") == 1
    assert words in ran.stderr


def test_an_onnx_runtime_without_the_operators_of_caches(
    model: tuple[Path, TinyDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.10's last is."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    ran = CliRunner().invoke(app, [str(model[0]), "--prompt", "A", "--json"])
    assert ran.exit_code == UNAVAILABLE
    for words in (
        f"{model[0]}: ONNX Runtime 1.23.2 is too old for models with caches",
        "install onnxruntime 1.25 or newer",
    ):
        assert words in json.loads(ran.stdout)["error"]
    ran = CliRunner().invoke(app, [str(TOKENIZER), "--prompt", "A", "--json"])  # a directory, which is exported
    assert ran.exit_code == UNAVAILABLE
    assert "or add --task features" in json.loads(ran.stdout)["error"]


def test_a_model_without_caches_is_refused(gated_mlps: Path) -> None:
    ran = CliRunner().invoke(app, [str(gated_mlps), "--prompt", "a"])
    assert ran.exit_code == MODEL_AT_FAULT
    assert "a model without caches" in ran.stderr


@pytest.mark.parametrize(
    ("left_out", "options", "words"),
    [("*.safetensors", ["--chat"], "has no chat template"), ("token*", [], "no tokenizer is there")],
    ids=["chat", "tokenizer"],
)
def test_what_a_directory_lacks_is_told_before_its_export(
    left_out: str, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object) -> Path:
        raise AssertionError("exported")

    monkeypatch.setattr(huggingface, "export", export)
    shutil.copytree(TOKENIZER, tmp_path / "model", ignore=shutil.ignore_patterns(left_out))
    ran = CliRunner().invoke(app, [str(tmp_path / "model"), "--prompt", "a", *options])
    assert ran.exit_code == USAGE, ran.output
    assert f"{tmp_path / 'model'}: " in ran.stderr.replace("\n", "")
    assert words in " ".join(ran.stderr.split())


def test_what_acts_on_a_terminal_is_shown_as_escapes() -> None:
    assert printable("a\x1b[2J\tb\u202e\n\x07é") == "a\\u001b[2J\tb\\u202e\n\\u0007é"
