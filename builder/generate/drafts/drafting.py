"""The drafts of a batch. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ...errors import UsageError
from ...model.decoder_contract import LOGIT_TOKENS
from ..runner import Runner
from .drafter import Drafter, DraftLength, DraftStatistics
from .gain import Gain


class Drafting:
    """Drafts of a batch: whose, how long for each sequence, and what became of them."""

    def __init__(self, drafter: Drafter | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`drafter` None: no drafts. `clock`, in seconds, tells whether they gain."""
        self._drafter, self._clock, self._most = drafter, clock, LOGIT_TOKENS - 1
        self._lengths: list[DraftLength] = []
        self._gain = Gain(clock)
        #: Whether `propose` was called since the last step.
        self._proposed = False
        self._runner: Runner | None = None
        self.statistics = DraftStatistics()

    def start(self, runner: Runner, batch: int) -> None:
        """Raises UsageError where the runner's decoder cannot verify drafts."""
        self.statistics = DraftStatistics()
        self._runner = runner
        if self._drafter is None:
            return
        if runner.decoder.verified_tokens < 2:
            raise UsageError(
                f"{runner.name}: no draft can be verified: it gives the logits of one token a step; build it again "
                "with this version, or use --draft none"
            )
        self._drafter.start(batch)
        self._most = min(LOGIT_TOKENS, runner.decoder.verified_tokens, runner.longest_step) - 1
        if batch != len(self._lengths):
            self._gain = Gain(self._clock)
        self._lengths = [DraftLength(self._most) for _ in range(batch)]

    def begin(self, number: int, source: int, kept: int) -> None:
        """As `Drafter.begin`."""
        if self._drafter is not None:
            self._lengths[number] = DraftLength(self._most)
            self._drafter.begin(number, source, kept)

    def observe(self, past: np.ndarray, new: np.ndarray, rows: Sequence[int] | None = None) -> None:
        """As `Drafter.observe`; `rows`: by default all."""
        if not self._proposed:
            self._gain.begin(counts=False)
        self._proposed = False
        if self._drafter is not None:
            self._drafter.observe(range(len(past)) if rows is None else rows, past, new)

    def drafts(
        self, texts: Sequence[Sequence[int]], cached: Sequence[int], running: Collection[int], left: int
    ) -> list[list[int]]:
        """A draft behind each of `texts`; empty for those that do not run. `cached`: tokens of each that caches and
        states hold. `left`: most tokens that still fit."""
        assert self._runner is not None
        decoder = self._runner.decoder
        free = decoder.capacity - max(len(texts[number]) for number in running)
        if decoder.states and free < 2 * LOGIT_TOKENS:
            free = 0  # a wrong draft's tokens are fed again, all rows padded to them, too
        room = min(left - 1, free)
        if (recompute := decoder.recompute_length) is not None:
            # The step at which a text runs again takes no draft, and none goes past it.
            room = min([room, *(recompute - len(texts[n]) for n in running if len(texts[n]) <= recompute + 1)])
        most = [0] * len(texts)
        for number in running:
            most[number] = min(room, self._most + 1 - (len(texts[number]) - cached[number]))
        return self.propose(texts, most)

    def propose(self, texts: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """A draft of at most `most[i]` tokens behind each of `texts`, and no longer than is worth it."""
        if self._drafter is None:
            return [[] for _ in texts]
        self._proposed, worth = True, self._gain.begin(max(most) > 0)
        wanted = [max(min(each.wanted, limit, worth), 0) for each, limit in zip(self._lengths, most, strict=True)]
        return self._drafter.propose(texts, wanted) if any(wanted) else [[] for _ in texts]

    def learn(self, number: int, drafted: int, accepted: int) -> None:
        """Take in how many of a sequence's drafted tokens the model drew itself."""
        if self._lengths:
            self._lengths[number].learn(drafted, accepted)
            self._gain.learn(drafted, accepted)
        self.statistics.count(drafted, accepted)
