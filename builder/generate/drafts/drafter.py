"""The interface of drafters, and the best length of a draft. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


class Drafter(Protocol):
    """Guesses what follows each text. The model draws every token itself, so a wrong guess costs time, never text."""

    #: For messages and reports.
    name: str

    def start(self, batch: int) -> None:
        """Forget all texts; so many sequences follow."""

    def begin(self, number: int, source: int, kept: int) -> None:
        """Sequence `number` is another text from here on, with the first `kept` tokens of that of sequence `source`."""
        return  # not abstract: only a server's sequences begin one by one

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        """A draft of at most `wanted[i]` tokens behind each of `texts`, prompts included, which only grow between
        calls, but for those that began anew. An empty draft where it has no guess."""

    def observe(self, rows: Sequence[int], past: np.ndarray, new: np.ndarray) -> None:
        """See the model's step that has just written `new` [rows] tokens at `past` [rows] of these sequences."""
        return  # not abstract: only heads read what it left


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
    """How many tokens to draft for one sequence next: twice as many once all were accepted, otherwise one more than
    were."""

    def __init__(self, most: int) -> None:
        self._most, self.wanted = most, min(4, most)

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in what became of the step's draft."""
        if drafted:
            self.wanted = min(2 * drafted if accepted == drafted else accepted + 1, self._most)
