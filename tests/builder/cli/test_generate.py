"""The command: what it prints where, and its messages and exit codes."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from command_lines import invoked

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.cli.generate import app, printable
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE
from trt_nvfp4.builder.export import huggingface
from trt_nvfp4.builder.generate.tokenizer import Tokenizer

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
    ran = invoked(app, [path, *prompts, "--json"])
    found = json.loads(ran.stdout)
    for generation in found["generations"]:
        assert generation["token_ids"] == tiny.greedy(generation["prompt_ids"], 6)
    assert "tokens/s" in ran.stderr
    plain = CliRunner().invoke(app, [str(path), *prompts])
    assert plain.stdout == "".join(printable(generation["text"]) + "\n" for generation in found["generations"])
    streamed = CliRunner().invoke(app, [str(path), *prompts[:2], *prompts[4:], "--stream"])
    assert streamed.stdout == printable(found["generations"][0]["text"]) + "\n"


def test_a_full_cache_is_a_warning(model: tuple[Path, TinyDecoder]) -> None:
    invoked(app, [model[0], "--prompt", "A", "--max-new-tokens", "400"], 0, "the cache of 24 tokens is full")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", "word " * 40], USAGE, "the caches hold 24"),
        (["--prompt", "a", "--tokenizer", "/nowhere"], USAGE, "no tokenizer is there"),
        (["--prompt", "a"] * 5, USAGE, "takes at most 4 at once"),
        (["--prompt", "a", "--chat"], USAGE, "no chat template; leave out --chat, or put"),
        (["--prompt", "a\udcff"], USAGE, "not UTF-8 text, from character 2 on"),
        (["--prompt", "a", "--top-k", "3"], USAGE, "greedy decoding ignores it"),
        (["--prompt", "a", "--prompt", "b", "--stream"], USAGE, "would mix"),
        (["--prompt", "a", "--system", "b"], USAGE, "add --chat"),
        (["--prompt-file", "/dev/zero"], USAGE, "give an ordinary file"),
    ],
)
def test_bad_input_is_one_message(model: tuple[Path, TinyDecoder], arguments: list[str], code: int, words: str) -> None:
    ran = invoked(app, [model[0], *arguments], code)
    assert not ran.stdout
    assert ran.stderr.count("error: ") == 1
    assert words in ran.stderr


def test_prompts_in_files(model: tuple[Path, TinyDecoder], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A story\n")
    ran = CliRunner().invoke(app, [str(model[0]), "--prompt-file", str(tmp_path / "a.txt"), "--max-new-tokens", "3"])
    same = CliRunner().invoke(app, [str(model[0]), "--prompt", "A story", "--max-new-tokens", "3"])
    assert ran.stdout == same.stdout
    assert ran.stdout
    assert "the model names no token that ends a text" in " ".join(ran.stderr.split())


def test_a_conversation(model: tuple[Path, TinyDecoder]) -> None:
    """Each answer has all messages before it in view."""
    path, tiny = model
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (path.parent / "tokenizer" / "chat_template.jinja").write_text(template)
    options = ["--chat", "--system", "be", "--max-new-tokens", "2"]
    ran = invoked(app, [path, *options], input="one\n\ntwo\n")
    tokenizer, said, shown = Tokenizer(path.parent / "tokenizer"), "be ", []
    for line in ("one", "two"):
        said += f"{line} "
        answer = tokenizer.decode(tiny.greedy(tokenizer.encode(said, special_tokens=False), 2))
        shown.append(printable(answer))
        said += f"{answer} "
    assert ran.stdout == "".join(f"{answer}\n" for answer in shown)


def test_an_onnx_runtime_without_the_operators_of_caches(
    model: tuple[Path, TinyDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.10's last is."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    ran = invoked(app, [model[0], "--prompt", "A", "--json"], UNAVAILABLE)
    for words in (
        f"{model[0]}: ONNX Runtime 1.23.2 is too old for models with caches",
        "install onnxruntime 1.25 or newer",
    ):
        assert words in json.loads(ran.stdout)["error"]
    ran = invoked(app, [TOKENIZER, "--prompt", "A", "--json"], UNAVAILABLE)
    assert "or add --task features" in json.loads(ran.stdout)["error"]


def test_a_model_without_caches_is_refused(gated_mlps: Path) -> None:
    invoked(app, [gated_mlps, "--prompt", "a"], MODEL_AT_FAULT, "a model without caches")


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
    ran = invoked(app, [tmp_path / "model", "--prompt", "a", *options], USAGE)
    assert f"{tmp_path / 'model'}: " in ran.stderr.replace("\n", "")
    assert words in " ".join(ran.stderr.split())


def test_what_acts_on_a_terminal_is_shown_as_escapes() -> None:
    assert printable("a\x1b[2J\tb\u202e\n\x07é") == "a\\u001b[2J\tb\\u202e\n\\u0007é"
