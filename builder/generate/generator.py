"""Text generation in Python: prompts in, text and timings out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import USAGE, BuilderError
from .loop import Finish, Token, generate_ids
from .open import RunnerName, opened, tokenizer_folder
from .sampling import Sampling
from .tokenizer import TextStream, Tokenizer

#: A prompt as text, or as token ids, which need no tokenizer.
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Piece:
    """What one step adds to one sequence. `text` is empty where a character takes more tokens, and without a tokenizer;
    `finish` is set on a sequence's last piece."""

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
    """Seconds until the first tokens, and tokens of all sequences per second after them (None for a single step)."""

    first_token_s: float
    tokens_per_s: float | None
    tokens: int


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
    Raises BuilderError as the runners do; see `open_runner`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        manifest: str | Path | None = None,
        runner: RunnerName = "auto",
    ) -> None:
        self._made = ExitStack()
        try:
            self._runner, _ = opened(Path(path), self._made, None if manifest is None else Path(manifest), runner)
        except BaseException:
            self._made.close()
            raise
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self._folder = Path(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer_folder(Path(path))
        self.runs_on = self._runner.name
        self.decoder = self._runner.decoder

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        stop: Sequence[int] | None = None,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Result:
        """Continue every prompt, all in one batch; greedy by default.

        `chat` puts each text into the tokenizer's chat template; `stop` replaces the model's own stop tokens. The
        token ids hold the stop token, the text does not. `on_piece` sees every piece as it is generated. Raises
        BuilderError (usage) for prompts that do not fit.
        """
        ids = self._encode(prompts, chat)
        begun = time.perf_counter()
        found: list[list[int]] = [[] for _ in ids]
        finish: list[Finish] = ["length"] * len(ids)
        first: float | None = None
        for piece in self._pieces(ids, max_new_tokens, Sampling(temperature, top_k, top_p, seed), stop):
            first = time.perf_counter() if first is None else first
            found[piece.sequence].append(piece.token_id)
            finish[piece.sequence] = piece.finish or finish[piece.sequence]
            if on_piece is not None:
                on_piece(piece)
        assert first is not None
        total = sum(map(len, found))
        later = total - len(ids)
        timings = Timings(first - begun, later / (time.perf_counter() - first) if later else None, total)
        texts = ["" if self._tokenizer is None else self._tokenizer.decode(tokens) for tokens in found]
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
        stop: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """The same, piece by piece as they are generated. Prompts are checked before the first one is asked for."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        return self._pieces(self._encode(prompts, chat), max_new_tokens, sampling, stop)

    def _pieces(
        self, ids: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, stop: Sequence[int] | None
    ) -> Iterator[Piece]:
        stop = self.decoder.eos_token_ids if stop is None else stop
        steps = generate_ids(self._runner, ids, max_new_tokens, sampling, stop)
        texts = None if self._tokenizer is None else [TextStream(self._tokenizer) for _ in ids]

        def piece(token: Token) -> Piece:
            last = token.finish is not None
            text = "" if texts is None else texts[token.sequence].add(token.id, last)
            return Piece(token.sequence, token.id, text, token.finish)

        return (piece(token) for tokens in steps for token in tokens)

    def _encode(self, prompts: Prompt | Sequence[Prompt], chat: bool) -> list[list[int]]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(entry, int) for entry in prompts))
        batch: Sequence[object] = [prompts] if one else prompts
        return [self._encoded(prompt, chat) for prompt in batch]

    def _encoded(self, prompt: object, chat: bool) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self._folder)
            return self._tokenizer.encode_chat(prompt) if chat else self._tokenizer.encode(prompt)
        if chat:
            raise BuilderError(USAGE, "a chat template takes text, and a prompt of token ids was given")
        return [int(token) for token in prompt]  # type: ignore[attr-defined]
