"""Text generation in Python: prompts in, text and timings out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .drafts.drafter import DraftStatistics
from .drafts.drafting import Drafting
from .drafts.open import check_draft, open_drafter
from .loop import Finish, Token, generate_ids
from .open import RunnerName, opened, tokenizer_folder
from .sampling import Sampling
from .tokenizer import TextStream, Tokenizer

#: A prompt as text, as token ids, which need no tokenizer, or as the messages of a chat (`role`, `content`).
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Piece:
    """A token that one step adds to one sequence. `text` is empty where a character takes more tokens, and without a
    tokenizer; `finish` is set on a sequence's last piece."""

    sequence: int
    token_id: int
    text: str
    finish: Finish | None


@dataclass(frozen=True)
class Generation:
    """One prompt and what followed it. `finish`: a stop token, max_new_tokens (length) or a full cache (capacity)."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish: Finish


@dataclass(frozen=True)
class Timings:
    """Seconds until the first tokens, tokens of all sequences per second after them (None for a single step), and what
    became of drafts."""

    first_token_s: float
    tokens_per_s: float | None
    tokens: int
    drafts: DraftStatistics = field(default_factory=DraftStatistics)


@dataclass(frozen=True)
class Result:
    """A batch of generations, in the order of the prompts. `runs_on` says what ran the model."""

    generations: list[Generation]
    timings: Timings
    runs_on: str


class Generator:
    """Generates text with a decoder: an engine, a bundle, an exported or rewritten ONNX model, or a Hugging Face
    directory, which is exported to a scratch folder first.

    >>> with Generator("model.engine") as generator:
    ...     print(generator.generate(["Once upon a time"], max_new_tokens=32).generations[0].text)

    `tokenizer` is a folder with tokenizer files, or a loaded one; default: `tokenizer/` beside the model, or the
    directory. It is read when text is given.
    `manifest`: of the bundle that an engine was built from, where the engine does not lie in the bundle. `runner`:
    "tensorrt" runs an engine on its GPU, "onnxruntime" the ONNX model on the CPU, and "torch" the ONNX model on any
    NVIDIA GPU with its plugins (on a CPU without one); "auto" is tensorrt for engines and onnxruntime for models.
    `draft` proposes tokens that one step verifies together, which changes the time and never the text: "ngram" (what
    followed the same words before), "none", or a head or a small model with the same tokenizer; None is what was built
    with the model, else ngram, where the model can verify drafts.
    Raises BuilderError as the runners do; see `open_runner`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        manifest: str | Path | None = None,
        runner: RunnerName = "auto",
        draft: str | Path | None = None,
    ) -> None:
        check_draft(draft)
        self._made = ExitStack()
        try:
            self._runner, _ = opened(Path(path), self._made, None if manifest is None else Path(manifest), runner)
            self._folder = Path(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer_folder(Path(path))
            drafter = open_drafter(draft, Path(path), self._folder, self._runner, self._made, runner)
            self._drafting = Drafting(drafter)
        except BaseException:
            self._made.close()
            raise
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self.runs_on = self._runner.name
        self.decoder = self._runner.decoder

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the caches, an engine's memory on the GPU, and an export."""
        self._made.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        chat: bool = False,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        stop: Sequence[int | str] | None = None,
        system: str | None = None,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Result:
        """Continue every prompt, all in one batch; greedy by default.

        `chat` puts each text into the tokenizer's chat template, behind the message `system`; prompts of messages are
        chats anyway. `stop`: token ids replace the model's own stop tokens, and before the first of its strings the
        text ends. The token ids hold what ended them, the text does not. Penalties are explained at `Sampling`.
        `on_piece` sees every piece as it is generated. Raises UsageError for prompts that do not fit.
        """
        ids = self._encode(prompts, chat, system)
        sampling = Sampling(temperature, top_k, top_p, seed, repetition_penalty, presence_penalty)
        begun = time.perf_counter()
        found: list[list[int]] = [[] for _ in ids]
        finish: list[Finish] = ["length"] * len(ids)
        first: float | None = None
        for piece in self._pieces(ids, max_new_tokens, sampling, stop):
            first = time.perf_counter() if first is None else first
            found[piece.sequence].append(piece.token_id)
            finish[piece.sequence] = piece.finish or finish[piece.sequence]
            if on_piece is not None:
                on_piece(piece)
        assert first is not None
        total = sum(map(len, found))
        later = total - len(ids)
        rate = later / (time.perf_counter() - first) if later else None
        timings = Timings(first - begun, rate, total, self._drafting.statistics)
        texts = [self._text(tokens, why, stop) for tokens, why in zip(found, finish, strict=True)]
        generations = [Generation(*fields) for fields in zip(ids, found, texts, finish, strict=True)]
        return Result(generations, timings, self.runs_on)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        chat: bool = False,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        stop: Sequence[int | str] | None = None,
        system: str | None = None,
    ) -> Iterator[Piece]:
        """The same, piece by piece as they are generated. Prompts are checked at the call."""
        sampling = Sampling(temperature, top_k, top_p, seed, repetition_penalty, presence_penalty)
        return self._pieces(self._encode(prompts, chat, system), max_new_tokens, sampling, stop)

    def _pieces(
        self, ids: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, stop: Sequence[int | str] | None
    ) -> Iterator[Piece]:
        stops, strings = self._stops(stop)
        texts = None if self._tokenizer is None else [TextStream(self._tokenizer, strings) for _ in ids]

        def ends(sequence: int, token: int) -> bool:
            if texts is None:
                return False
            texts[sequence].add(token)
            return texts[sequence].is_stopped

        def piece(token: Token) -> Piece:
            text = "" if texts is None else texts[token.sequence].take(token.finish is not None)
            return Piece(token.sequence, token.id, text, token.finish)

        steps = generate_ids(self._runner, ids, max_new_tokens, sampling, stops, self._drafting, ends)
        return (piece(token) for tokens in steps for token in tokens)

    def _stops(self, stop: Sequence[int | str] | None) -> tuple[frozenset[int], list[str]]:
        """The tokens and the strings that end a text."""
        given = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
        strings = [entry for entry in given if isinstance(entry, str)]
        if not all(strings):
            raise UsageError("a stop string is empty; leave it out")
        if strings and self._tokenizer is None:
            self._tokenizer = Tokenizer(self._folder)
        tokens = [entry for entry in given if not isinstance(entry, str)]
        return frozenset(tokens or ([] if stop is not None and not strings else self.decoder.eos_token_ids)), strings

    def _text(self, tokens: Sequence[int], finish: Finish, stop: Sequence[int | str] | None) -> str:
        if self._tokenizer is None:
            return ""
        stops, strings = self._stops(stop)
        text = self._tokenizer.decode(tokens[:-1] if finish == "stop" and tokens[-1] in stops else tokens)
        return text[: min((place for word in strings if (place := text.find(word)) >= 0), default=len(text))]

    def _encode(self, prompts: Prompt | Sequence[Prompt], chat: bool, system: str | None) -> list[list[int]]:
        one = isinstance(prompts, str) or any(
            len(prompts) > 0 and all(isinstance(entry, kind) for entry in prompts) for kind in (int, Mapping)
        )
        batch: Sequence[object] = [prompts] if one else prompts
        return [self._encoded(prompt, chat, system) for prompt in batch]

    def _encoded(self, prompt: Any, chat: bool, system: str | None) -> list[int]:
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)
        if isinstance(prompt, str) or is_chat:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self._folder)
            if not (chat or is_chat):
                return self._tokenizer.encode(prompt)
            messages = prompt if is_chat else [{"role": "user", "content": prompt}]
            first = [] if system is None else [{"role": "system", "content": system}]
            return self._tokenizer.encode_chat([*first, *messages])
        if chat:
            raise UsageError("a chat template takes text, and a prompt of token ids was given")
        return [int(token) for token in prompt]
