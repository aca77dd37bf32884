"""Text to token ids and back, by the tokenizer that lies beside an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.tokenizers import (
    TemplateError,
    decoded,
    has_simple_decoder,
    load_tokenizer,
    render_chats,
    tokenized,
)

from ..errors import ModelFaultError, UnavailableError, UsageError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A Hugging Face tokenizer and its chat template, from local files; no code of theirs is run."""

    def __init__(self, folder: Path) -> None:
        """Raises BuilderError: usage without a tokenizer, unavailable without transformers, model for a broken one."""
        self._folder = folder
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise UsageError(
                f"{folder}: no tokenizer is there (tokenizer.json or tokenizer_config.json), and text needs one; copy "
                "the model's tokenizer there, or name its folder with --tokenizer"
            )
        try:
            self._tokenizer = load_tokenizer(folder)
        except ImportError as error:
            raise UnavailableError(f"text needs transformers: pip install transformers ({error})") from error
        except Exception as error:  # transformers raises many kinds for a broken tokenizer
            raise ModelFaultError(f"{folder}: transformers cannot load its tokenizer: {error}") from error
        self._has_simple_decoder = has_simple_decoder(self._tokenizer)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The text's tokens. `special_tokens`: with those that the tokenizer adds, such as one at the beginning. Raises
        UsageError for text that is not UTF-8, (model) for a tokenizer that comes to no end."""
        tokenize = self._tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes that the command line could not decode
            raise UsageError(
                f"prompt {text[:40]!r}: not UTF-8 text, from character {error.start + 1} on; give it in UTF-8"
            ) from error
        try:
            found = tokenized(lambda: list(tokenize(text, add_special_tokens=special_tokens)["input_ids"]), len(text))
        except LimitError as error:
            raise ModelFaultError(f"{self._folder}: its tokenizer fails: {error}") from error
        return [int(token) for token in found]

    def check_chat(self, instead: str) -> None:
        """Raise UsageError without a chat template; the message says what to do `instead`."""
        if not self.has_chat_template:
            raise UsageError(
                f"{self._folder}: this tokenizer has no chat template; {instead}, or put the model's "
                "chat_template.jinja there"
            )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def wrapped(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    def encode_chat(
        self, chat: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """A user's message, or the messages of a chat (`role`, `content`), with what the assistant's answer begins
        with. `tools`: the functions that the model may call, as the template takes them. Raises UsageError without a
        chat template, ModelFaultError where it fails."""
        self.check_chat("give texts in place of chats (a server takes them at /v1/completions)")
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        try:
            (rendered,) = render_chats(self._tokenizer, [messages], True, tools)
        except (TemplateError, LimitError) as error:
            raise ModelFaultError(f"{self._folder}: its chat template fails: {error}") from error
        # Templates write the special tokens themselves.
        return self.encode(rendered, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones. Raises ModelFaultError for a tokenizer that fails."""
        try:
            return decoded(self._tokenizer, ids, self._has_simple_decoder)
        except (LimitError, ValueError) as error:
            raise ModelFaultError(f"{self._folder}: its tokenizer fails: {error}") from error


class TextStream:
    """Text of a growing sequence of tokens, as it becomes certain: a character may take several tokens, and the text
    ends before the first of the `stop` strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # Tokens from `_start` are decoded again, for the spaces between words; those before `_shown` have been given.
        self._start = self._shown = 0
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> None:
        """The next token; afterwards `is_stopped` says whether a stop string has come."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        if not text.endswith(_REPLACEMENT):
            self._show(text)

    def take(self, last: bool) -> str:
        """The text that has become certain since the last call; in the `last` call all that is left."""
        if last and self._shown < len(self._ids):
            self._show(self._tokenizer.decode(self._ids[self._start :]))
        kept = 0 if last or self.is_stopped else max(map(self._beginning, self._stop), default=0)
        certain = len(self._held) - kept
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _show(self, text: str) -> None:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        if len(text) > len(before):  # a token without a text, such as a special one, tells nothing of spaces
            self._start = self._shown
        self._shown = len(self._ids)
        self._held += text[len(before) :]
        if places := [place for stop in self._stop if (place := self._held.find(stop)) >= 0]:
            self._held, self.is_stopped = self._held[: min(places)], True

    def _beginning(self, stop: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((count for count in range(longest, 0, -1) if self._held.endswith(stop[:count])), 0)
