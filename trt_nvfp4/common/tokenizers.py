"""Tokenizers of Hugging Face directories that anybody may have made; their patterns and templates may never end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.limited import limited
from trt_nvfp4.common.model_config import check_counts

# Of a template or a pattern, beside what a text's length allows for.
_SECONDS = 30.0
# The slowest tokenizers, written in Python, do ten times as many; of chats, templates write hundreds a second.
_CHARACTERS_PER_SECOND = 5000
_CHATS_PER_SECOND = 20
# What decodes so few characters by so few decoders, none of which can take long, needs no process of its own.
_SHORT = 1 << 20
_FEW_DECODERS = 16
# Decoders that make no text longer than by a space for each token; and, of those that replace a text, where it is: in
# front of, and behind, each character lies an empty one.
_PLAIN = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Sequence", "Strip", "WordPiece"}
_REPLACED = {"BPEDecoder": "suffix", "CTC": "word_delimiter_token"}


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder by transformers. Raises ImportError without transformers, else whatever a broken one
    raises."""
    import transformers

    if (folder / "config.json").is_file():  # names the tokenizer's class, and is read whole for it
        check_counts(read_json(folder / "config.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, use_fast=True, trust_remote_code=trust_remote_code
    )

    def tried() -> str:
        # Some broken tokenizers recurse for ever over an unknown token that they lack; this meets it here, not in the
        # middle of a run.
        found = tokenizer("a", add_special_tokens=tokenizer.unk_token_id is None)
        return str(tokenizer.decode(found["input_ids"]))

    tokenized(tried, 1)
    return tokenizer


def tokenized(function: Callable[[], Any], characters: int) -> Any:
    """What `function` makes of so many characters with a tokenizer, as JSON has it. Raises LimitError."""
    return limited(function, _SECONDS + characters / _CHARACTERS_PER_SECOND)


def has_simple_decoder(tokenizer: Any) -> bool:
    """Whether decoding takes as long as the text is: by few decoders, of which none replaces what a pattern finds, or
    makes the text longer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return True
    found = list(_decoders(json.loads(backend.decoder.__getstate__())))
    return len(found) <= _FEW_DECODERS and all(map(_shortens, found))


def _decoders(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield decoder
    for each in decoder.get("decoders", ()):
        yield from _decoders(each)


def _shortens(decoder: Mapping[str, Any]) -> bool:
    kind = decoder["type"]
    if kind == "Replace":
        text = decoder["pattern"].get("String")
        return bool(text) and len(decoder["content"]) <= len(text)
    return kind in _PLAIN or (kind in _REPLACED and bool(decoder[_REPLACED[kind]]))


def decoded(tokenizer: Any, ids: Sequence[int], is_simple: bool) -> str:
    """The text of tokens, without special ones. `is_simple`: `has_simple_decoder`. Raises LimitError."""

    def run() -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    characters = sum(len(token or "") for token in tokenizer.convert_ids_to_tokens(list(ids)))
    return run() if is_simple and characters <= _SHORT else str(tokenized(run, characters))


class TemplateError(Exception):
    """A chat template refuses the chat of that `number`; the message is the template's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def render_chats(
    tokenizer: Any, chats: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool = False
) -> list[str]:
    """Each chat as the template of a tokenizer, or processor, writes it. Raises TemplateError, or LimitError for a
    template without an end."""

    # transformers renders in Jinja's sandbox, which bounds neither time nor memory.
    def rendered() -> dict[str, Any]:
        texts: list[str] = []
        options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            texts += (str(tokenizer.apply_chat_template(list(chat), **options)) for chat in chats)
        except MemoryError:
            raise
        except Exception as error:  # templates raise what they like
            return {"texts": texts, "refused": f"{error}"}
        return {"texts": texts}

    found = limited(rendered, _SECONDS + len(chats) / _CHATS_PER_SECOND)
    if "refused" in found:
        raise TemplateError(len(found["texts"]), found["refused"])
    return list(found["texts"])
