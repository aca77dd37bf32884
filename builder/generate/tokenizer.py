"""Text to token ids and back, by the tokenizer that lies beside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.tokenizers import (
    TemplateError,
    decoded,
    has_simple_decoder,
    load_tokenizer,
    render_chats,
    tokenized,
)

from ..errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE, BuilderError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A Hugging Face tokenizer and its chat template, from local files; no code of theirs is run."""

    def __init__(self, folder: Path) -> None:
        """Raises BuilderError: usage without a tokenizer, unavailable without transformers, model for a broken one."""
        self._folder = folder
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise BuilderError(
                USAGE,
                f"{folder}: no tokenizer is there (tokenizer.json or tokenizer_config.json), and text needs one; copy "
                "the model's tokenizer there, or name its folder with --tokenizer",
            )
        try:
            self._tokenizer = load_tokenizer(folder)
        except ImportError as error:
            raise BuilderError(UNAVAILABLE, f"text needs transformers: pip install transformers ({error})") from error
        except Exception as error:  # transformers raises many kinds for a broken tokenizer
            raise BuilderError(MODEL_AT_FAULT, f"{folder}: transformers cannot load its tokenizer: {error}") from error
        self._has_simple_decoder = has_simple_decoder(self._tokenizer)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The text's tokens. `special_tokens`: with those that the tokenizer adds, such as one at the beginning. Raises
        BuilderError (usage) for text that is not UTF-8, (model) for a tokenizer that comes to no end."""
        tokenize = self._tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes that the command line could not decode
            raise BuilderError(
                USAGE, f"prompt {text[:40]!r}: not UTF-8 text, from character {error.start + 1} on; give it in UTF-8"
            ) from error
        try:
            found = tokenized(lambda: list(tokenize(text, add_special_tokens=special_tokens)["input_ids"]), len(text))
        except LimitError as error:
            raise BuilderError(MODEL_AT_FAULT, f"{self._folder}: its tokenizer fails: {error}") from error
        return [int(token) for token in found]

    def check_chat(self) -> None:
        """Raise BuilderError (usage) without a chat template."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise BuilderError(
                USAGE,
                f"{self._folder}: this tokenizer has no chat template; leave out --chat, or put the model's "
                "chat_template.jinja there",
            )

    def encode_chat(self, text: str) -> list[int]:
        """The text as a user's message, with what the assistant's answer begins with. Raises BuilderError (usage)
        without a chat template, (model) where it fails."""
        self.check_chat()
        try:
            (rendered,) = render_chats(self._tokenizer, [[{"role": "user", "content": text}]], True)
        except (TemplateError, LimitError) as error:
            raise BuilderError(MODEL_AT_FAULT, f"{self._folder}: its chat template fails: {error}") from error
        # Templates write the special tokens themselves.
        return self.encode(rendered, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones. Raises BuilderError (model) for a tokenizer that fails."""
        try:
            return decoded(self._tokenizer, ids, self._has_simple_decoder)
        except LimitError as error:
            raise BuilderError(MODEL_AT_FAULT, f"{self._folder}: its tokenizer fails: {error}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, which is no Exception, and can be had by name alone
                raise
            raise BuilderError(MODEL_AT_FAULT, f"{self._folder}: its tokenizer fails: {error}") from error


class TextStream:
    """Text of a growing sequence of tokens, as it becomes certain: a character may take several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from `_start` are decoded again, for the spaces between words; those before `_shown` have been given.
        self._start = self._shown = 0

    def add(self, token: int, last: bool) -> str:
        """What the token adds to the text; with the `last` one, all that is left."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        text = self._tokenizer.decode(self._ids[self._start :])
        if not last and text.endswith(_REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(before) :]
