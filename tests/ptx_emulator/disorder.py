"""What hardware may do at any time and a fair scheduler never does: warps that are slow to go on behind a wait, peeks
at a barrier that come too early, stores whose lanes and words land one after another, copies that read global memory at
once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import Wait

if TYPE_CHECKING:
    from .machine import Fragment

# Rounds of all other warps that a slow one stays behind, at most.
_MOST_ROUNDS = 64
# Rounds in which others only poll, after which the next slow warp's comes.
_POLLS = 4
# Of peeks at a barrier whose phase goes on, those that do not wait for its end.
_EARLY = 0.5
# Of asynchronous copies, those that read their source when they are issued.
_AT_ONCE = 0.5


class Disorder:
    """Drawn from a seed. `share` of the waits, peeks and stores are disturbed; 0: none."""

    def __init__(self, seed: str, share: float) -> None:
        self.share = share
        self.random = random.Random(seed)
        self.round = 0
        self._awaited: set[int] = set()  # rounds in which slow warps go on
        self._polls = 0

    def holds(self, wait: Wait) -> bool:
        """Whether the warp behind a wait that is over stays where it is in this round."""
        if wait.held_until is None:
            wait.held_until = self.round
            if wait.may_be_slow and self._strikes():
                wait.held_until += self.random.randint(1, _MOST_ROUNDS)
                self._awaited.add(wait.held_until)
        return wait.held_until > self.round

    def next_round(self) -> None:
        self.round += 1
        self._awaited.discard(self.round)

    def skip(self) -> bool:
        """Nothing but slow warps and those that poll can go on: on to the round before the next slow one does, once the
        others have polled some times. False if none is slow."""
        self._awaited = {r for r in self._awaited if r > self.round}
        if not self._awaited:
            return False
        self._polls += 1
        if self._polls == _POLLS:
            self._polls = 0
            self.round = min(self._awaited) - 1
        return True

    def peek_fails(self, fragment: Fragment, over: bool) -> bool:
        """Whether a peek at a barrier sees nothing: where its phase is over, as if it had come earlier, and never twice
        in a row; where it is not, more often, as no time passes here."""
        strikes = self._strikes() if over else self.share > 0 and self.random.random() < _EARLY
        fragment.peeked_in_vain = not fragment.peeked_in_vain and strikes
        return fragment.peeked_in_vain

    def first_to_land(self, count: int) -> Any:
        """Which words [32, count] of a store's lanes land before the others, or None if all land at once."""
        if not self._strikes():
            return None
        bits = self.random.getrandbits(32 * count)
        return np.array([bits >> i & 1 for i in range(32 * count)], bool).reshape(32, count)

    def reads_at_once(self) -> bool:
        """Whether a copy that is issued now reads global memory now; else as late as it may."""
        return self.share > 0 and self.random.random() < _AT_ONCE

    def _strikes(self) -> bool:
        return self.share > 0 and self.random.random() < self.share
