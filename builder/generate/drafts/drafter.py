"""The interface of drafters, and the best length of a draft. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

#: Steps without a draft after one of which nothing was accepted; they double each time, up to the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 1, 32


class Drafter(Protocol):
    """Guesses what follows each text. The model draws every token itself, so a wrong guess costs time, never text."""

    #: For messages and reports.
    name: str
    #: Whether it reads the model's hidden states of every step.
    takes_hidden: bool = False

    def start(self, batch: int) -> None:
        """Forget all texts; so many sequences follow."""

    def begin(self, number: int, source: int, kept: int) -> None:
        """Sequence `number` is another text from here on, with the first `kept` tokens of that of sequence `source`."""
        return  # not abstract: only a server's sequences begin one by one

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        """A draft of at most `wanted[i]` tokens behind each of `texts`, prompts included, which only grow between
        calls, but for those that began anew. An empty draft where it has no guess."""

    def observe(self, rows: Sequence[int], past: np.ndarray, new: np.ndarray, hidden: np.ndarray) -> None:
        """Take in the hidden states, [rows, tokens, hidden_size], of the model's step that wrote `new` [rows] tokens at
        `past` [rows] of these sequences. Only where it `takes_hidden`."""
        return  # not abstract: most drafters read none


@dataclass
class DraftStatistics:
    """Steps of the model, tokens that were drafted for them, and of these the accepted; by place in their drafts too:
    [drafted, accepted] of first tokens, second tokens and so on."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[list[int]] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Count one sequence's draft."""
        self.drafted += drafted
        self.accepted += accepted
        self.by_position += [[0, 0] for _ in range(drafted - len(self.by_position))]
        for place in range(drafted):
            self.by_position[place][0] += 1
            self.by_position[place][1] += place < accepted


class DraftLength:
    """How many tokens to draft for one sequence next: twice as many once all were accepted, as many as were accepted
    otherwise, and none for some steps where none was."""

    def __init__(self, most: int) -> None:
        self._most, self._length = most, min(4, most)
        self._pause, self._waits = _FIRST_PAUSE, 0

    def wanted(self) -> int:
        """Tokens to draft for this step."""
        if self._waits:
            self._waits -= 1
            return 0
        return self._length

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in what became of the step's draft."""
        if not drafted:
            return
        if accepted:
            self._pause = _FIRST_PAUSE
            self._length = min(2 * drafted if accepted == drafted else accepted + 1, self._most)
            return
        self._length, self._waits = 1, self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
