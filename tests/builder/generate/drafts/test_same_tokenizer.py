"""Tokenizers are told apart by every token, and by which of them are special."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnx_models.tiny_decoder import VOCAB
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.drafts.same_tokenizer import check_same_tokenizer

TOKENS = ["a", "b", "c", "\u0120d"]


def write(folder: Path, tokens: list[str], special: bool = True, unigram: bool = False) -> Path:
    """A tokenizer's folder; its last token is an added one, special or not."""
    vocabulary: Any = [[token, -1.5] for token in tokens] if unigram else {t: at for at, t in enumerate(tokens)}
    added = [{"id": len(tokens), "content": "<end>", "special": special}]
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"tokens": TOKENS}, None),
        ({"tokens": TOKENS, "unigram": True}, None),
        ({"tokens": ["a", "c", "b", "\u0120d"]}, r"token 1 is 'c' in .*other.* and 'b' in .*model"),
        ({"tokens": TOKENS, "special": False}, r"token 4 is '<end>' in .* and '<end>' \(special\) in"),
        ({"tokens": [*TOKENS, "e"]}, r"token 4 is 'e' in .* and '<end>' \(special\) in"),
        ({"tokens": TOKENS[:3]}, r"token 3 is '<end>' \(special\) in"),
    ],
)
def test_differences(other: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    folders = write(tmp_path / "model", TOKENS), write(tmp_path / "other", **other)
    if says is None:
        check_same_tokenizer("--draft d", *folders)
        return
    with pytest.raises(UsageError, match=f"^--draft d: {says}.*; give a model with the same tokenizer$"):
        check_same_tokenizer("--draft d", *folders)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"vocab": [1]}}', '{"model": {"vocab": {"a": "x"}}}'])
def test_a_broken_file(content: str, tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", TOKENS), write(tmp_path / "other", TOKENS)
    (other / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFaultError, match=r"other/tokenizer.json: not a tokenizer's file"):
        check_same_tokenizer("--draft d", model, other)


def test_folders_without_a_tokenizer_say_nothing(tmp_path: Path) -> None:
    check_same_tokenizer("--draft d", write(tmp_path / "model", TOKENS), tmp_path)


def test_generate_refuses_a_drafter_of_another_tokenizer(tiny_of: Callable[..., Any], tmp_path: Path) -> None:
    for name, token in (("model", "x"), ("draft", "y")):
        write(tmp_path / name / "tokenizer", [*(f"t{at}" for at in range(VOCAB - 2)), token])
        tiny_of().save(tmp_path / name / "m.onnx")
    with pytest.raises(UsageError, match=f"token {VOCAB - 2} is 'y' in .*draft/tokenizer/tokenizer.json and 'x' in"):
        Generator(tmp_path / "model" / "m.onnx", draft=tmp_path / "draft" / "m.onnx")
    with Generator(tmp_path / "model" / "m.onnx", draft=tmp_path / "model" / "m.onnx") as generator:
        assert generator.generate([[1]], max_new_tokens=4).timings.drafts.drafted
