"""Whether drafts gain time. Needs only NumPy: bundles carry this module."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

#: The share of all time that drafts may cost where none is right.
_SHARE = 0.02
#: Steps of one kind that are remembered, and those of them that must be known: the first choose kernels and record.
_KEPT, _KNOWN = 4, 3
#: Steps without drafts that the drafts of better times may cost, and steps after which one of them is timed again.
_CREDIT, _RETIMED = 8.0, 64
#: Tokens to draft until their cost is known.
_FIRST = 4
#: What counts of the share of right tokens after one more.
_MEMORY = 0.98


class Gain:
    """Lets a batch draft as long as that costs no more time than it saves, by the measured times of steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        #: Seconds of the last steps by the length of their longest draft, 0 for steps without drafts.
        self._seconds: dict[int, deque[float]] = {0: deque(maxlen=_KEPT)}
        #: What drafts saved, in steps without drafts, and how many steps had some since one had none.
        self._saved, self._since = 0.0, 0
        #: What a drafted token costs, in steps without drafts, and how often one behind right ones is right.
        self._cost: float | None = None
        self._chance = 0.9
        #: The step that is being taken: its begin, if it can tell of gains, its seconds, its longest draft, and how
        #: many tokens of each sequence's were right.
        self._begun: float | None = None
        self._took, self._longest, self._accepted = 0.0, 0, list[int]()

    def begin(self, counts: bool) -> int:
        """Begin a step, of those that tell of gains if it `counts`. Returns the most tokens to draft: one more would be
        likelier to cost time than to save it."""
        if self._begun is not None and self._accepted:
            self._learn(self._longest, sum(self._accepted) / len(self._accepted), self._took)
        self._begun, self._longest, self._accepted = self._clock() if counts else None, 0, []
        if self._saved < 0 or self._since >= (_RETIMED if len(self._seconds[0]) >= _KNOWN else 1):
            return 0
        if self._cost is None:
            return _FIRST
        return max(1, int(math.log(min(max(self._cost, 1e-9), 1)) / math.log(self._chance)))

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in one sequence's draft, once the step is done."""
        if self._begun is not None:
            self._took = self._took if self._accepted else self._clock() - self._begun
            self._accepted.append(accepted)
            self._longest = max(self._longest, drafted)
        if drafted:
            tried = accepted + (accepted < drafted)
            self._chance += (1 - _MEMORY**tried) * (accepted / tried - self._chance)
            self._chance = min(max(self._chance, 0.01), 0.99)

    def _learn(self, longest: int, accepted: float, seconds: float) -> None:
        """Take in a step: the length of its longest draft, how many tokens per sequence were right, and the `seconds`
        of drafting and verifying."""
        self._since = self._since + 1 if longest else 0
        taken, plain = self._seconds.setdefault(longest, deque(maxlen=_KEPT)), self._seconds[0]
        taken.append(seconds)
        if min(len(taken), len(plain)) < _KNOWN:
            return
        saved = _SHARE
        if longest:
            cost = min(taken) / max(min(plain), 1e-9) - 1
            self._cost, saved = cost / longest, accepted - cost
        self._saved = min(self._saved + saved, _CREDIT)
