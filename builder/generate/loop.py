"""Prefill and decode: token ids in, token ids out, over any runner. Needs NumPy alone: bundles carry this module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ..errors import MODEL_AT_FAULT, USAGE, BuilderError
from ..export.decoder_contract import Decoder
from .logits import Logits
from .sampling import Sampler, Sampling

#: Why a sequence ended: a stop token, the number of tokens asked for, or a full cache.
Finish = Literal["stop", "length", "capacity"]


class Runner(Protocol):
    """A decoder with its caches on some device. `name` says where it runs, for messages."""

    name: str
    decoder: Decoder
    #: Most tokens per sequence that one step takes.
    longest_step: int

    def start(self, batch: int) -> None:
        """Empty caches for so many sequences."""

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> Logits:
        """Append `new` [batch] of `ids` [batch, tokens] (int64, padded on the right) at `past` [batch]; returns logits
        [batch, vocab] of each sequence's last valid token."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True)
class Token:
    """A generated token of one sequence; `finish` is set on its last one."""

    sequence: int
    id: int
    finish: Finish | None


def generate_ids(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Collection[int] = (),
) -> Iterator[list[Token]]:
    """The tokens of every step, for the sequences that still run; prompts may differ in length.

    A stop token is given out as a sequence's last one. A sequence whose cache is full ends with finish "capacity".
    Raises BuilderError before the first step: usage for prompts that the decoder cannot take.
    """
    check(runner, prompts, max_new_tokens)
    return _run(runner, [list(prompt) for prompt in prompts], max_new_tokens, sampling, frozenset(stop))


def check(runner: Runner, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise BuilderError (usage) for what the decoder cannot take."""
    decoder = runner.decoder
    if not prompts:
        raise BuilderError(USAGE, "there is no prompt: give at least one --prompt")
    if max_new_tokens < 1:
        raise BuilderError(USAGE, f"--max-new-tokens {max_new_tokens}: expected 1 or more")
    if len(prompts) > decoder.max_batch:
        raise BuilderError(
            USAGE,
            f"{runner.name}: {len(prompts)} prompts, but the model takes at most {decoder.max_batch} at once; give "
            "fewer, or build it with a larger --max-batch",
        )
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise BuilderError(USAGE, f"prompt {number} is empty: it has no token")
        if len(prompt) > decoder.capacity:
            raise BuilderError(
                USAGE,
                f"{runner.name}: prompt {number} has {len(prompt)} tokens, but the caches hold {decoder.capacity}; "
                "shorten it, or build the model with a larger --cache-capacity",
            )
        if not 0 <= min(prompt) <= max(prompt) < decoder.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < decoder.vocab_size)
            raise BuilderError(
                USAGE,
                f"{runner.name}: prompt {number} holds token {wrong}, but the model knows {decoder.vocab_size}: the "
                "tokenizer is another model's",
            )
        if decoder.recompute_length is not None and len(prompt) > max(decoder.recompute_length, runner.longest_step):
            raise BuilderError(
                USAGE,
                f"{runner.name}: prompt {number} has {len(prompt)} tokens, and one step takes {runner.longest_step}: "
                f"beyond {decoder.recompute_length} tokens this model's rotary frequencies change, so that its prompts "
                "cannot be taken in pieces; build it with longer prompts (--max-shapes)",
            )


def _run(
    runner: Runner, texts: list[list[int]], max_new_tokens: int, sampling: Sampling, stop: frozenset[int]
) -> Iterator[list[Token]]:
    decoder = runner.decoder
    prompts = [len(text) for text in texts]
    running = list(range(len(texts)))
    choose = Sampler(sampling, len(texts))
    runner.start(len(texts))
    logits = prefill(runner, texts)
    while True:
        likeliest = logits.likeliest(choose.candidates)
        if not likeliest.finite[running].all():
            raise BuilderError(MODEL_AT_FAULT, f"{runner.name}: the model's logits hold NaN or Inf")
        tokens = []
        for number, token in zip(running, choose(likeliest, running), strict=True):
            texts[number].append(token)
            finish: Finish | None = None
            if token in stop:
                finish = "stop"
            elif len(texts[number]) - prompts[number] == max_new_tokens:
                finish = "length"
            elif len(texts[number]) > decoder.capacity:
                finish = "capacity"
            tokens.append(Token(number, token, finish))
        yield tokens
        running = [token.sequence for token in tokens if token.finish is None]
        if not running:
            return
        # Sequences that have ended run along: their last cached token is written once more, which changes nothing.
        rows = [text if number in running else text[:-1] for number, text in enumerate(texts)]
        logits = advance(runner, rows, running)


def advance(runner: Runner, rows: Sequence[Sequence[int]], running: Sequence[int]) -> Logits:
    """Append each row's last token to the caches, which hold those before; logits of it. `running`: the rows that have
    not ended."""
    recompute = runner.decoder.recompute_length
    if recompute is not None and any(len(rows[number]) == recompute + 1 for number in running):
        _check_recompute(runner, rows)
        return prefill(runner, rows)
    return runner.step(
        np.array([[row[-1]] for row in rows], np.int64),
        np.array([len(row) - 1 for row in rows], np.int64),
        np.ones(len(rows), np.int64),
    )


def prefill(runner: Runner, rows: Sequence[Sequence[int]]) -> Logits:
    """Run all tokens of every row from its first; logits of the last ones. In pieces where a step takes fewer."""
    longest = max(map(len, rows))
    for start in range(0, longest, runner.longest_step):
        # A row that ends in an earlier piece has its last token written once more, for its logits.
        past = np.array([min(start, len(row) - 1) for row in rows], np.int64)
        pieces = [row[begin : begin + runner.longest_step] for row, begin in zip(rows, past, strict=True)]
        new = np.array([len(piece) for piece in pieces], np.int64)
        ids = np.zeros((len(rows), new.max()), np.int64)
        for row, piece in zip(ids, pieces, strict=True):
            row[: len(piece)] = piece
        logits = runner.step(ids, past, new)
    return logits


def _check_recompute(runner: Runner, rows: Sequence[Sequence[int]]) -> None:
    if (longest := max(map(len, rows))) > runner.longest_step:
        raise BuilderError(
            USAGE,
            f"{runner.name}: at {longest} tokens this model's rotary frequencies change, and a step takes "
            f"{runner.longest_step}: it cannot run the text again; ask for fewer tokens (--max-new-tokens), or "
            "build it with longer prompts (--max-shapes)",
        )
