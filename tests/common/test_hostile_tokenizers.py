"""Chat templates and tokenizers without an end, or larger than the memory: one message, in commands and calibration."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.generate import tokenizer as generating
from trt_nvfp4.calibration.samples import text
from trt_nvfp4.calibration.samples.samples import InputSpec, load_samples
from trt_nvfp4.common import limited, tokenizers
from trt_nvfp4.common.errors import CalibrationError

IDS = {"input_ids": InputSpec(("batch", "sequence"), np.dtype(np.int64))}
CHAT = {"messages": [{"role": "user", "content": "one two"}]}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A row of x that is followed by what no text has: tried in as many ways as there are to part it.
PATTERN = "(x+x+)+y"
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokenizers, "_SECONDS", 20)
    monkeypatch.setattr(limited, "MEMORY", 1 << 28)
    write(tmp_path, pre_tokenizers.Whitespace())
    return tmp_path


def write(folder: Path, splitting: pre_tokenizers.PreTokenizer) -> None:
    words = {word: number for number, word in enumerate(["[UNK]", "user", ":", "one", "two"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = splitting
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chats.jsonl").write_text(json.dumps({"text": "two"}) + "\n" + json.dumps(CHAT))


def refused(folder: Path, words: str) -> None:
    """Both by `generate --chat` and as calibration data."""
    started = time.monotonic()
    with pytest.raises(ModelFaultError, match=f"its chat template fails: .*{words}"):
        generating.Tokenizer(folder).encode_chat("one two")
    with pytest.raises(CalibrationError, match=f"chats.jsonl.*template.*{words}"):
        load_samples(folder / "chats.jsonl", IDS, folder)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOPS, "does not end within 2 s"),
        ("{{ 10 ** (10 ** 10) }}", "does not end within 2 s"),  # one operation, which no signal interrupts
        ("{{ 'a' * 10 ** 12 }}", "more than 0.25 GB of memory"),
        ("{% set found = namespace(x='a' * 10 ** 8) %}{% for a in range(40) %}{% set found.x = found.x ~ found.x %}"
         "{% endfor %}", "more than 0.25 GB of memory"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion|nested|parentheses"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
    ids=["loops", "power", "product", "doubled", "nested", "raises", "unsafe"],
)  # fmt: skip
def test_templates(folder: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "does not end" in words:
        monkeypatch.setattr(tokenizers, "_SECONDS", 2)
    (folder / "chat_template.jinja").write_text(template)
    refused(folder, words)


def test_sound_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    assert generating.Tokenizer(folder).encode_chat("one two") == [1, 2, 3, 4]
    plain, chat = (sample["input_ids"].tolist() for sample in load_samples(folder / "chats.jsonl", IDS, folder))
    assert (plain, chat) == ([[4]], [[1, 2, 3, 4]])


def test_texts_are_tokenized_in_several_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is lost or moved, and none comes twice; a paragraph longer than all that one process takes is whole."""
    words = [["one"], ["two", "one"], ["one"] * 9, ["two"], ["user", ":"], ["one", "two"]]
    (folder / "a.txt").write_text("\n\n".join(" ".join(paragraph) for paragraph in words))
    sizes: list[int] = []

    def counted(function: Callable[[], Any], characters: int) -> Any:
        sizes.append(characters)
        return tokenizers.tokenized(function, characters)

    monkeypatch.setattr(text, "_BATCH", 12)
    monkeypatch.setattr(text, "tokenized", counted)
    numbers = {"user": 1, ":": 2, "one": 3, "two": 4}
    expected = [[[numbers[word] for word in paragraph]] for paragraph in words]
    assert [sample["input_ids"].tolist() for sample in load_samples(folder / "a.txt", IDS, folder)] == expected
    assert sizes == [10, 35, 9, 7]


def test_the_line_that_a_template_refuses(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(CalibrationError, match=r"chats.jsonl, line 2: .* refuses it: one two"):
        load_samples(folder / "chats.jsonl", IDS, folder)


def test_patterns(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(folder, pre_tokenizers.Split(Regex(PATTERN), "isolated"))
    row = "x" * 200
    with pytest.raises(BuilderError, match=r"its tokenizer fails: .*retry-limit-in-match over"):
        generating.Tokenizer(folder).encode(row)
    (folder / "a.txt").write_text(row)
    with pytest.raises(CalibrationError, match=r"a.txt: the tokenizer of .* fails: .*retry-limit-in-match over"):
        load_samples(folder / "a.txt", IDS, folder)
    assert capfd.readouterr().err == "", "what Rust prints of it"


def test_patterns_of_decoders(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["x" * 200])
    tokenizer.decoder = decoders.Replace(Regex(PATTERN), "")
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BuilderError, match=r"its tokenizer fails: .*retry-limit-in-match over"):
        generating.Tokenizer(folder).decode([5])


def test_decoders_that_lengthen_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("o", "o" * 64)] * 8)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BuilderError, match=r"its tokenizer fails: its process ended early"):
        generating.Tokenizer(folder).decode([3])


@pytest.mark.parametrize(
    ("decoder", "is_simple"),
    [
        (None, True),
        (decoders.ByteLevel(), True),
        (LLAMA, True),
        (decoders.Replace("▁", "__"), False),
        (decoders.Sequence([LLAMA, decoders.Replace(Regex("x+"), "")]), False),
        (decoders.Sequence([decoders.Fuse()] * 17), False),
        (decoders.BPEDecoder(), True),
        (decoders.BPEDecoder(suffix=""), False),
        (decoders.CTC(), True),
        (decoders.Sequence([decoders.CTC(word_delimiter_token="")]), False),
        (decoders.Replace("", ""), False),
    ],
)
def test_which_decoders_run_with_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, decoder: Any, is_simple: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoder
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = generating.Tokenizer(folder)
    expected = tokenizer.decode([3, 4, 3])
    forks: list[Any] = []

    def counted(function: Callable[[], Any], characters: int) -> Any:
        forks.append(characters)
        return function()

    monkeypatch.setattr(tokenizers, "tokenized", counted)
    assert loaded.decode([3, 4, 3]) == expected
    assert forks == ([] if is_simple else [9])
    monkeypatch.setattr(tokenizers, "_SHORT", 8)
    forks.clear()
    assert loaded.decode([3, 4, 3]) == expected
    assert forks == [9], "a long text"


def test_configurations_beside(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 10**9}))
    with pytest.raises(BuilderError, match="num_hidden_layers is 1000000000"):
        generating.Tokenizer(folder)
    with pytest.raises(CalibrationError, match="num_hidden_layers is 1000000000"):
        load_samples(folder / "chats.jsonl", IDS, folder)


@pytest.mark.parametrize("charsmap", ["CAAAAP//////////YWJj", "YWI="], ids=["indices beyond the end", "cut off"])
def test_normalizers_that_panic(folder: Path, charsmap: str) -> None:
    """In Rust: what it raises is no Exception."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    token = {"id": 5, "content": "x", "normalized": True, "special": False}
    content["added_tokens"] = [{**token, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFaultError, match="its files make the library panic"):
        generating.Tokenizer(folder).encode("one")
    with pytest.raises(CalibrationError, match="panic"):
        load_samples(folder / "chats.jsonl", IDS, folder)
