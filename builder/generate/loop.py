"""Prefill and decode: token ids in, token ids out, over any runner. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import ModelFaultError, UsageError
from .drafts.drafting import Drafting
from .logits import Logits
from .runner import Runner
from .sampling import Sampler, Sampling

#: Why a sequence ended: a stop token, max_new_tokens, or a full cache.
Finish = Literal["stop", "length", "capacity"]
#: Sees tokens cached before, and new ones of every row, [batch] each, of the step that a runner has just taken.
Observe = Callable[[np.ndarray, np.ndarray], None]


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
    drafting: Drafting | None = None,
    ends: Callable[[int, int], bool] | None = None,
) -> Iterator[list[Token]]:
    """The tokens of every step, for the sequences that still run; prompts may differ in length.

    A stop token is given out as a sequence's last one, and so is one of which `ends(sequence, token)` says so; it sees
    every other token once, in order. A sequence whose cache is full ends with finish "capacity".
    With `drafting` a step may give several tokens of one sequence, in order; they are those of no drafting: each is
    drawn from the model's own logits, and a draft goes on only while it holds the token that was drawn.
    Raises BuilderError before the first step: usage for prompts that the decoder cannot take, or drafts.
    """
    check(runner, prompts, max_new_tokens)
    drafting = drafting or Drafting()
    drafting.start(runner, len(prompts))
    return _run(runner, [list(prompt) for prompt in prompts], max_new_tokens, sampling, frozenset(stop), drafting, ends)


def check(runner: Runner, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise UsageError for what the decoder cannot take."""
    decoder = runner.decoder
    if decoder.takes_hidden:
        raise UsageError(f"{runner.name}: a head, which drafts for another model; give that model, and this by --draft")
    if not prompts:
        raise UsageError("there is no prompt: give at least one --prompt")
    if max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {max_new_tokens}: expected 1 or more")
    if len(prompts) > decoder.max_batch:
        raise UsageError(
            f"{runner.name}: {len(prompts)} prompts, but the model takes at most {decoder.max_batch} at once; give "
            "fewer, or build it with a larger --max-batch"
        )
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise UsageError(f"prompt {number} is empty: it has no token")
        if len(prompt) > decoder.capacity:
            raise UsageError(
                f"{runner.name}: prompt {number} has {len(prompt)} tokens, but the caches hold {decoder.capacity}; "
                "shorten it, or build the model with a larger --cache-capacity"
            )
        if not 0 <= min(prompt) <= max(prompt) < decoder.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < decoder.vocab_size)
            raise UsageError(
                f"{runner.name}: prompt {number} holds token {wrong}, but the model knows {decoder.vocab_size}: the "
                "tokenizer is another model's"
            )
        if decoder.recompute_length is not None and len(prompt) > max(decoder.recompute_length, runner.longest_step):
            raise UsageError(
                f"{runner.name}: prompt {number} has {len(prompt)} tokens, and one step takes {runner.longest_step}: "
                f"beyond {decoder.recompute_length} tokens this model's rotary frequencies change, so that its prompts "
                "cannot be taken in pieces; build it with longer prompts (--max-shapes)"
            )


def _run(
    runner: Runner,
    texts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    drafting: Drafting,
    ends: Callable[[int, int], bool] | None,
) -> Iterator[list[Token]]:
    decoder = runner.decoder
    prompts = [len(text) for text in texts]
    longest = [prompt + max_new_tokens for prompt in prompts]
    running = list(range(len(texts)))
    choose = Sampler(sampling, len(texts))
    runner.start(len(texts))
    logits = prefill(runner, texts, drafting.observe)
    drafts: list[list[int]] = [[] for _ in texts]
    # Tokens that caches and states hold: all but the last, and where a wrong draft's state went back, those before it.
    cached = prompts.copy()

    def finish(number: int) -> Finish | None:
        token = texts[number][-1]
        if token in stop or (ends is not None and ends(number, token)):
            return "stop"
        if len(texts[number]) == longest[number]:
            return "length"
        return "capacity" if len(texts[number]) > decoder.capacity else None

    while True:
        count = 1 + max(map(len, drafts))
        likeliest = logits.likeliest(choose.candidates)
        tokens: list[Token] = []
        wrong = []
        for number in running:
            draft = drafts[number]
            first = (number + 1) * count - 1 - len(draft)
            if not likeliest.finite[first : first + 1 + len(draft)].all():
                raise ModelFaultError(f"{runner.name}: the model's logits hold NaN or Inf")
            for place in range(1 + len(draft)):
                texts[number].append(choose(likeliest, first + place, number, texts[number], prompts[number]))
                tokens.append(Token(number, texts[number][-1], finish(number)))
                accepted = place + (texts[number][-1:] == draft[place : place + 1])
                if tokens[-1].finish is not None or accepted == place:
                    drafting.learn(number, len(draft), accepted)
                    break
            if decoder.states and accepted < len(draft):
                wrong.append(number)
            else:
                cached[number] = len(texts[number]) - 1
        if wrong:
            runner.restore_states(wrong)
        drafting.statistics.steps += 1
        yield tokens
        ended = {token.sequence for token in tokens if token.finish is not None}
        running = [number for number in running if number not in ended]
        if not running:
            return
        left = max(longest[number] - len(texts[number]) for number in running)
        drafts = drafting.drafts(texts, cached, running, left)
        if decoder.states and any(drafts):
            runner.save_states()
        logits = advance(runner, texts, running, drafts, cached, drafting.observe)


def advance(
    runner: Runner,
    rows: Sequence[Sequence[int]],
    running: Sequence[int],
    drafts: Sequence[Sequence[int]] | None = None,
    cached: Sequence[int] | None = None,
    observe: Observe | None = None,
) -> Logits:
    """Append each row's tokens behind the `cached` ones (default: all but the last) and its draft to the caches;
    logits of the last token and the draft, as many for each row as the longest draft asks for. `running`: the rows that
    have not ended. The others' first token runs along, and nothing reads the result."""
    recompute = runner.decoder.recompute_length
    if recompute is not None and any(len(rows[number]) == recompute + 1 for number in running):
        # Drafts let a row end long before the others: its last tokens, which nothing reads, need not fit the step.
        again = [row if number in running else row[: runner.longest_step] for number, row in enumerate(rows)]
        _check_recompute(runner, again)
        runner.start(len(rows))
        return prefill(runner, again, observe)
    drafts = drafts or [[]] * len(rows)
    past, new = np.zeros(len(rows), np.int64), np.full(len(rows), _idle(runner), np.int64)
    tails = [row[:1] for row in rows]
    for number in running:
        past[number] = len(rows[number]) - 1 if cached is None else cached[number]
        tails[number] = [*rows[number][past[number] :], *drafts[number]]
        new[number] = len(tails[number])
    width = max(map(len, tails))
    ids = np.array([[*tail, *[0] * (width - len(tail))] for tail in tails], np.int64)
    logits = runner.step(ids, past, new, 1 + max(map(len, drafts)))
    if observe is not None:
        observe(past, new)
    return logits


def prefill(runner: Runner, rows: Sequence[Sequence[int]], observe: Observe | None = None) -> Logits:
    """Run all tokens of every row from its first; logits of the last ones. In pieces where a step takes fewer, which
    all rows end in the last of: a shorter one begins in a later piece. `observe` sees every step."""
    lengths = np.array([len(row) for row in rows], np.int64)
    longest = int(lengths.max())
    for start in range(0, longest, runner.longest_step):
        # Tokens of each row before and behind this piece. One that has not begun writes what its first token replaces.
        past, end = (np.maximum(at - (longest - lengths), 0) for at in (start, start + runner.longest_step))
        new = np.minimum(end, lengths) - past
        ids = np.zeros((len(rows), new.max()), np.int64)
        for tokens, row, begin, count in zip(ids, rows, past, new, strict=True):
            tokens[:count] = row[begin : begin + count]
        new = np.where(new > 0, new, _idle(runner))
        logits = runner.step(ids, past, new)
        if observe is not None:
            observe(past, new)
    return logits


def _idle(runner: Runner) -> int:
    """How many tokens a row is said to have that runs along: none where they would move a state."""
    return 0 if runner.decoder.states else 1


def _check_recompute(runner: Runner, rows: Sequence[Sequence[int]]) -> None:
    if (longest := max(map(len, rows))) > runner.longest_step:
        raise UsageError(
            f"{runner.name}: at {longest} tokens this model's rotary frequencies change, and a step takes "
            f"{runner.longest_step}: it cannot run the text again; ask for fewer tokens (--max-new-tokens), or "
            "build it with longer prompts (--max-shapes)"
        )
