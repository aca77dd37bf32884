"""Tokenizers of Hugging Face directories that anybody may have made; their patterns and templates may never end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.limited import limited
from trt_nvfp4.common.model_config import check_counts, read_config

# Time for a template or a pattern, beside the time by the text's length.
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


@contextmanager
def no_panics() -> Iterator[None]:
    """Raises ValueError for a panic of Rust code, such as the tokenizers', which is no Exception and has no type to
    import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"its files make the library panic: {error}") from error


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder by transformers. Raises ImportError without transformers, else whatever a broken one
    raises."""
    import transformers

    if (folder / "config.json").is_file():  # names the tokenizer's class, and is read whole for it
        check_counts(read_config(folder))
    with no_panics():
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, use_fast=True, trust_remote_code=trust_remote_code
        )

    if not tokenizer.chat_template and (template := _of_processor(folder)):
        tokenizer.chat_template = template

    def tried() -> str:
        # Some broken tokenizers recurse for ever over an unknown token that they lack; this meets it here, not in the
        # middle of a run.
        found = tokenizer("a", add_special_tokens=tokenizer.unk_token_id is None)
        return str(tokenizer.decode(found["input_ids"]))

    tokenized(tried, 1)
    return tokenizer


def _of_processor(folder: Path) -> str | dict[str, str] | None:
    """The chat template that older directories hold beside the tokenizer's files, where only processors look."""
    for name in ("chat_template.json", "processor_config.json"):
        content = read_json(folder / name) if (folder / name).is_file() else None
        if isinstance(content, Mapping) and isinstance(template := content.get("chat_template"), (str, dict)):
            return template
    return None


def tokenized(function: Callable[[], Any], characters: int) -> Any:
    """The result of `function` for so many characters with a tokenizer, converted to JSON and back. Raises
    LimitError."""
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
    """The text of tokens, without special ones. `is_simple`: `has_simple_decoder`. Raises LimitError, or ValueError for
    a decoder that panics."""

    def run() -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    with no_panics():
        characters = sum(len(token or "") for token in tokenizer.convert_ids_to_tokens(list(ids)))
        return run() if is_simple and characters <= _SHORT else str(tokenized(run, characters))


class TemplateError(Exception):
    """A chat template refuses the chat of that `number`; the message is the template's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def render_chats(
    tokenizer: Any,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Each chat as the template of a tokenizer, or processor, writes it: contents as they are given, strings or lists
    of parts, or in the other form where the template drops text of that one. Raises TemplateError where it drops text
    of both, or LimitError for a template without an end. `tools`: the functions that the model may call, as JSON."""

    # transformers renders in Jinja's sandbox, which bounds neither time nor memory.
    def rendered() -> dict[str, Any]:
        texts: list[str] = []
        template = _Template(tokenizer, add_generation_prompt, tools)
        try:
            texts += map(template.render, chats)
        except MemoryError:
            raise
        except Exception as error:  # templates raise what they like
            return {"texts": texts, "refused": f"{error}"}
        return {"texts": texts}

    found = limited(rendered, _SECONDS + len(chats) / _CHATS_PER_SECOND)
    if "refused" in found:
        raise TemplateError(len(found["texts"]), found["refused"])
    return list(found["texts"])


Chat = Sequence[Mapping[str, Any]]


class _Template:
    """A chat template, tried with words in place of a chat's texts to find the form of contents that it takes."""

    def __init__(self, tokenizer: Any, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._tokenizer, self._add_generation_prompt, self._tools = tokenizer, add_generation_prompt, tools
        self._forms: dict[str, Callable[[Any], Any]] = {}

    def render(self, chat: Chat) -> str:
        """Raises whatever the template raises, and ValueError where it drops text."""
        shape = repr([(message.get("role"), _with_text(message.get("content"), lambda text: "")) for message in chat])
        if shape not in self._forms:
            self._forms[shape] = self._form(chat)
        return self._written(chat, self._forms[shape])

    def _written(self, chat: Chat, form: Callable[[Any], Any]) -> str:
        messages = [{**message, "content": form(message.get("content"))} for message in chat]
        options = {"add_generation_prompt": self._add_generation_prompt, "tokenize": False, "tools": self._tools}
        return str(self._tokenizer.apply_chat_template(messages, **options))

    def _form(self, chat: Chat) -> Callable[[Any], Any]:
        words: list[str] = []

        def word(text: str) -> str:
            if not text.strip():
                return text
            words.append(f"{_WORD}{len(words)}z")
            return words[-1]

        tried = [{**message, "content": _with_text(message.get("content"), word)} for message in chat]
        given_as_text = all(isinstance(message["content"], str) for message in tried)
        refused: Exception | None = None
        for form in (_as_it_is, _as_parts if given_as_text else _as_text):
            try:
                text = self._written(tried, form)
            except MemoryError:
                raise
            except Exception as error:
                refused = refused or error
                continue
            # Parts that are written as Python or JSON writes them did not reach the template as parts.
            if all(word in text for word in words) and not (form is not _as_text and _OF_A_PART.search(text)):
                return form
        if refused is not None:
            self._written(chat, _as_it_is)  # whose own text the message may name
            raise refused
        raise ValueError(
            "it drops text of the messages, given as a string or as a list of parts; correct chat_template, or give "
            "text that needs none"
        )


_WORD = "q7word"
_OF_A_PART = re.compile(rf"""["']text["']: ["']{_WORD}""")


def _with_text(content: Any, change: Callable[[str], str]) -> Any:
    """A message's content with its text, or that of each of its parts, changed."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [{**part, "text": change(part["text"])} if _is_text(part) else part for part in content]
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _as_it_is(content: Any) -> Any:
    return content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text(content: Any) -> Any:
    """One string, where all parts are text."""
    is_parts = isinstance(content, list) and all(map(_is_text, content))
    return "".join(part["text"] for part in content) if is_parts else content
