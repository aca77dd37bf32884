"""A decoder that drafts greedily, with caches of its own: a smaller language model with the same tokenizer, or a head
that reads the model's hidden states. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import UsageError
from ...model.decoder_contract import LOGIT_TOKENS
from ..runner import DraftRunner, Runner, SlotRunner
from .drafter import Drafter

#: The most tokens behind a pause that are taken in steps of LOGIT_TOKENS, which are recorded, in place of a longer one.
_FEW = 8 * LOGIT_TOKENS


class ModelDrafter(Drafter):
    """Drafts with `runner`'s likeliest tokens. What it cached behind the text is written again once the model verified
    it.

    A head's position i takes token i + 1 and the model's hidden state of token i. Behind the text its own hidden states
    stand for the model's.
    """

    def __init__(self, runner: SlotRunner, model: Runner) -> None:
        """Raises UsageError for a drafter that does not fit `model`, or that must run its text again at some length."""
        own, other = runner.decoder, model.decoder
        wrong = None
        if own.vocab_size != other.vocab_size:
            sizes = f"it knows {own.vocab_size} tokens and the model {other.vocab_size}"
            wrong = f"{sizes}; give a model with the same tokenizer"
        elif own.recompute_length is not None:
            wrong = "its rotary frequencies change with the length of the text; give another"
        elif own.states:
            wrong = "its recurrent states cannot go back behind a wrong draft; give another"
        elif own.takes_hidden and other.hidden_size == 0:
            wrong = "a head reads hidden states, and the model gives out none; build the model with its head (--draft)"
        elif own.takes_hidden and own.hidden_size != other.hidden_size:
            wrong = (
                f"a head of hidden states of width {own.hidden_size}, and the model's have {other.hidden_size}; give "
                "the head that was built with the model"
            )
        if wrong is not None:
            raise UsageError(f"--draft {runner.name}: {wrong}")
        self.name, self._runner, self._model, self._is_head = runner.name, runner, model, own.takes_hidden
        self._device = runner if isinstance(runner, DraftRunner) and runner.drafts_for(model) else None
        self._cached: list[int] = []
        #: The model's hidden states by position, [batch, capacity, hidden_size], where no device keeps them.
        self._hidden = np.zeros((0, 0, 0), np.float32)

    def start(self, batch: int) -> None:
        decoder = self._runner.decoder
        if batch > decoder.max_batch:
            raise UsageError(
                f"--draft {self.name}: {batch} texts, but it takes at most {decoder.max_batch} at once; give fewer, or "
                "build it with a larger --max-batch"
            )
        self._runner.start(batch)
        self._cached = [0] * batch
        self._hidden = np.zeros((batch, self._model.decoder.capacity, decoder.hidden_size), np.float32)

    def observe(self, rows: Sequence[int], past: np.ndarray, new: np.ndarray) -> None:
        if not self._is_head:
            return
        hidden = self._model.hidden() if self._device is None else None
        for place, (number, begin, count) in enumerate(zip(rows, past.tolist(), new.tolist(), strict=True)):
            self._cached[number] = min(self._cached[number], begin)
            if hidden is not None:
                self._hidden[number, begin : begin + count] = hidden[place, :count]

    def begin(self, number: int, source: int, kept: int) -> None:
        self._hidden[number, :kept] = self._hidden[source, :kept]
        self._cached[number] = min(self._cached[source], max(0, kept - self._is_head))
        if self._cached[number] == 0:
            self._runner.clear_row(number)  # masked NaN would be NaN in the next text, too
        elif number != source:
            self._runner.copy_row(source, number)

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        capacity, cached, skipped = self._runner.decoder.capacity, self._cached, int(self._is_head)
        wanted = [
            min(most, capacity - len(text)) if len(text) > skipped else 0
            for most, text in zip(wanted, texts, strict=True)
        ]
        drafting = [number for number, most in enumerate(wanted) if most > 0]
        if not drafting:
            return [[] for _ in texts]
        lengths = [len(text) - skipped for text in texts]
        # Padding and what is drafted, too, must lie within the caches.
        count = min(max(wanted), capacity - max(lengths[number] for number in drafting))
        longest = max(lengths[number] - cached[number] for number in drafting)
        room = capacity - max(cached[number] for number in drafting)
        width = min(longest, self._runner.longest_step, room, LOGIT_TOKENS if longest <= _FEW else longest)
        for number in range(len(texts)):
            if number not in drafting:
                # It runs along, and writes behind what it has cached.
                cached[number] = min(cached[number], capacity - width - count + 1)
        # In pieces where a step takes fewer, which all texts end in the last of.
        for later in range((longest - 1) // width * width, -1, -width):
            past, new = np.array(cached, np.int64), np.ones(len(texts), np.int64)
            ids = np.zeros((len(texts), min(longest - later, width)), np.int64)
            for number in drafting:
                piece = texts[number][skipped + cached[number] : max(len(texts[number]) - later, 0)]
                ids[number, : len(piece)], new[number] = piece, max(len(piece), 1)
                cached[number] += len(piece)
            drafted = self._draft(ids, past, new, 1 if later else count)
        # The model verifies the draft later: until then only the text counts as cached.
        return [row[: max(most, 0)] for row, most in zip(drafted.tolist(), wanted, strict=True)]

    def _draft(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int) -> np.ndarray:
        """As `DraftRunner.draft`."""
        if self._device is not None:
            return self._device.draft(ids, past, new, count, self._model)
        found: list[np.ndarray] = []
        at = np.minimum(past[:, None] + np.arange(ids.shape[1]), self._hidden.shape[1] - 1)
        previous = np.take_along_axis(self._hidden, at[..., None], 1) if self._is_head else None
        while True:
            found.append(self._runner.step(ids, past, new, previous=previous).likeliest(1).ids)
            if len(found) == count:
                return np.concatenate(found, 1)
            if self._is_head:
                previous = np.take_along_axis(self._runner.hidden(), (new - 1)[:, None, None], 1)
            ids, past, new = found[-1], past + new, np.ones_like(new)
