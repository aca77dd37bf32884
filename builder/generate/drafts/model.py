"""A decoder that drafts greedily, with caches of its own: a smaller language model with the same tokenizer, or a head
that reads the model's hidden states. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ...errors import UsageError
from ...model.decoder_contract import Decoder
from ..runner import SlotRunner
from .drafter import Drafter


class ModelDrafter(Drafter):
    """Drafts with `runner`'s likeliest tokens. What it cached behind the text is written again once the model verified
    it.

    A head's position i takes token i + 1 and the model's hidden state of token i. Behind the text its own hidden states
    stand for the model's.
    """

    def __init__(self, runner: SlotRunner, model: Decoder) -> None:
        """Raises UsageError for a drafter that does not fit `model`, or that must run its text again at some length."""
        own = runner.decoder
        wrong = None
        if own.vocab_size != model.vocab_size:
            sizes = f"it knows {own.vocab_size} tokens and the model {model.vocab_size}"
            wrong = f"{sizes}; give a model with the same tokenizer"
        elif own.recompute_length is not None:
            wrong = "its rotary frequencies change with the length of the text; give another"
        elif own.states:
            wrong = "its recurrent states cannot go back behind a wrong draft; give another"
        elif own.takes_hidden and model.hidden_size == 0:
            wrong = "a head reads hidden states, and the model gives out none; build the model with its head (--draft)"
        elif own.takes_hidden and own.hidden_size != model.hidden_size:
            wrong = (
                f"a head of hidden states of width {own.hidden_size}, and the model's have {model.hidden_size}; give "
                "the head that was built with the model"
            )
        if wrong is not None:
            raise UsageError(f"--draft {runner.name}: {wrong}")
        self.name, self._runner, self.takes_hidden = runner.name, runner, own.takes_hidden
        self._cached: list[int] = []
        #: The hidden states of each text, by position, [hidden_size] each; None where they are gone.
        self._hidden: list[list[np.ndarray | None]] = []

    def start(self, batch: int) -> None:
        if batch > self._runner.decoder.max_batch:
            raise UsageError(
                f"--draft {self.name}: {batch} texts, but it takes at most {self._runner.decoder.max_batch} at once; "
                "give fewer, or build it with a larger --max-batch"
            )
        self._runner.start(batch)
        self._cached, self._hidden = [0] * batch, [[] for _ in range(batch)]

    def observe(self, rows: Sequence[int], past: np.ndarray, new: np.ndarray, hidden: np.ndarray) -> None:
        for number, begin, count, states in zip(rows, past.tolist(), new.tolist(), hidden, strict=True):
            self._cached[number] = min(self._cached[number], begin)
            self._hidden[number][begin:] = states[:count].copy()  # and not all rows' padding with them

    def begin(self, number: int, source: int, kept: int) -> None:
        self._hidden[number] = self._hidden[source][:kept]
        self._cached[number] = min(self._cached[source], max(0, kept - self.takes_hidden))
        if self._cached[number] == 0:
            self._runner.clear_row(number)  # masked NaN would be NaN in the next text, too
        elif number != source:
            self._runner.copy_row(source, number)

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        room = [self._runner.decoder.capacity - len(text) for text in texts]
        wanted = [min(most, free) for most, free in zip(wanted, room, strict=True)]
        rows = [list(text[self.takes_hidden :]) for text in texts]
        lengths = [len(row) for row in rows]
        wanted = [most if length else 0 for most, length in zip(wanted, lengths, strict=True)]
        for place in range(max(wanted)):
            for number, token in self._advance(rows, [at for at, most in enumerate(wanted) if most > place]).items():
                rows[number].append(token)
        # The model verifies the draft later: until then only the text counts as cached.
        self._cached = [min(cached, length) for cached, length in zip(self._cached, lengths, strict=True)]
        return [row[length:] for row, length in zip(rows, lengths, strict=True)]

    def _advance(self, rows: Sequence[Sequence[int]], wanted: Collection[int]) -> dict[int, int]:
        """Cache what is missing of the `wanted` rows; the likeliest token behind each. The others run along, and write
        behind what they have cached."""
        decoder, found = self._runner.decoder, dict[int, int]()
        while len(found) < len(wanted):
            pending = [number for number in wanted if number not in found]
            longest = max(len(rows[number]) - self._cached[number] for number in pending)
            # Padding, too, must lie within the caches. It may overwrite the last tokens of a row that runs along.
            room = decoder.capacity - max(self._cached[number] for number in pending)
            width = min(longest, self._runner.longest_step, room)
            self._cached = [min(cached, decoder.capacity - width) for cached in self._cached]
            past = np.array(self._cached, np.int64)
            ids, new = np.zeros((len(rows), width), np.int64), np.ones(len(rows), np.int64)
            previous = np.zeros((*ids.shape, decoder.hidden_size), np.float32) if self.takes_hidden else None
            for number in pending:
                begin = self._cached[number]
                piece = rows[number][begin : begin + width]
                ids[number, : len(piece)], new[number] = piece, len(piece)
                if previous is not None:
                    for place, state in enumerate(self._hidden[number][begin : begin + len(piece)]):
                        previous[number, place] = 0 if state is None else state
                self._cached[number] += len(piece)
            logits = self._runner.step(ids, past, new, previous=previous)
            if not (ended := [number for number in pending if self._cached[number] == len(rows[number])]):
                continue
            likeliest = logits.likeliest(1).ids[:, 0]
            own = self._runner.hidden() if self.takes_hidden else None
            for number in ended:
                found[number] = int(likeliest[number])
                if own is not None:
                    self._hidden[number][len(rows[number]) :] = [own[number, new[number] - 1]]
        return found
