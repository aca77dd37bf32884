"""Barriers and what a blocked thread waits for. Every wait can say who should have arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError, ProxyFenceError, RaceError
from .order import Access, Clock

if TYPE_CHECKING:
    from .machine import Cta, Warp

MAX_ARRIVALS = (1 << 20) - 1
MAX_TRANSACTIONS = (1 << 20) - 1


class Wait:
    """Why a fragment does not run. The scheduler resumes it when `ready`, or when `expire` allows giving up."""

    counts_as_progress = True
    #: Whether the warp may be slow to go on once the wait is over, and the round until which it is, once drawn.
    may_be_slow = True
    held_until: int | None = None

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def expire(self) -> None:
        """Let a wait that has a time limit end unsuccessfully."""


class Yielded(Wait):
    """Polling or sleeping: runs again in the next round, which is no progress by itself."""

    counts_as_progress = False
    may_be_slow = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def ready(self) -> bool:
        return True

    def describe(self) -> str:
        return self.reason


class Landing(Wait):
    """The words of a store that have yet to land; the warp goes on behind them."""

    def __init__(self, words: NDArray[np.bool_]) -> None:
        self.words = words

    def ready(self) -> bool:
        return True

    def describe(self) -> str:
        return "stores"


class MBarrier:
    """An mbarrier object: phase, pending arrivals, expected arrivals, transaction bytes.

    `initialised`: the warp that did so, and in which of its epochs. `fenced`: likewise, of the fences that make it
    visible to the async proxy.
    """

    def __init__(self, count: int, cta: Cta, offset: int, name: str, initialised: tuple[int, int]) -> None:
        if not 1 <= count <= MAX_ARRIVALS:
            raise EmulatorError(f"mbarrier.init with count {count}, not in 1..{MAX_ARRIVALS}, on {name}")
        self.count = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.name = name
        agents = cta.cluster.agents
        self.cta = cta
        self.agent = agents.mbarrier(cta.rank, offset)
        self.clock: Clock = np.zeros(agents.count, np.int64)
        #: What who waits for the last phase that is over has seen: not what arrived since.
        self.passed_clock = self.clock
        self.initialised = initialised
        self.fenced: list[tuple[int, int]] = []

    def check_seen(self, warp: Warp, by_async: bool) -> None:
        """That a warp which uses the barrier, itself or by an asynchronous operation, comes after its initialisation,
        and the operation after a fence. Another CTA's threads need none: CUTLASS's tmem_dealloc barrier has none.
        Raises RaceError, ProxyFenceError."""
        who, epoch = self.initialised
        if warp.clock[who] < epoch:
            raise RaceError(f"{warp.name} uses {self.name}, which warp {who} initialised, with no barrier between")
        if by_async and not any(warp.clock[w] >= e for w, e in self.fenced):
            raise ProxyFenceError(
                f"an asynchronous operation of {warp.name} completes on {self.name}, which no fence.mbarrier_init or "
                "fence.proxy.async made visible after its initialisation"
            )

    def access(self, clock: Clock, issued: int) -> Access:
        """What a copy does that completes on this barrier in its present phase."""
        assert self.agent is not None
        return Access(self.agent, self.cta.cluster.mbarrier_phases[self.agent] + 1, clock, issued)

    def publish(self, clock: Clock) -> None:
        """Who waits has seen what `clock` says."""
        np.maximum(self.clock, clock, out=self.clock)

    def arrive(self, count: int, warp: Warp | None) -> int:
        """Count arrivals; returns the phase arrived at. Raises EmulatorError when more arrive than are expected."""
        if self.cta.gone:
            raise EmulatorError(f"arrival on {self.name}, which has exited")
        if count > self.pending:
            raise EmulatorError(
                f"arrival count overflow on {self.name}: {count} arrive in phase {self.phase}, "
                f"{self.pending} of {self.count} are pending"
            )
        if warp is not None:
            warp.release(self.clock)
        phase = self.phase
        self.pending -= count
        self._advance()
        return phase

    def drop(self, count: int, warp: Warp | None) -> int:
        """`arrive_drop`: arrive and expect fewer from the next phase on."""
        if count > self.count:
            raise EmulatorError(f"arrive_drop of {count} from {self.name}, which expects {self.count}")
        self.count -= count
        return self.arrive(count, warp)

    def transact(self, amount: int) -> None:
        """expect_tx (positive) or complete_tx (negative)."""
        self.transactions += amount
        if not -MAX_TRANSACTIONS <= self.transactions <= MAX_TRANSACTIONS:
            raise EmulatorError(f"transaction count {self.transactions} out of range on {self.name}")
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            if self.agent is not None:
                phases = self.cta.cluster.mbarrier_phases
                phases[self.agent] += 1
                self.clock[self.agent] = phases[self.agent]
            self.passed_clock = self.clock.copy()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return (self.phase & 1) != parity

    def describe(self) -> str:
        return (
            f"{self.name}: phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.count} arrivals "
            f"pending, {self.transactions} transaction bytes outstanding"
        )


class MBarrierWait(Wait):
    def __init__(self, waits: list[tuple[MBarrier, int, bool]]) -> None:
        """`waits`: barrier, parity or phase token, whether it is a parity."""
        self.waits = waits
        self.expired = False

    def ready(self) -> bool:
        return self.expired or all(b.passed(value) if parity else b.phase > value for b, value, parity in self.waits)

    @property
    def counts_as_progress(self) -> bool:  # type: ignore[override]
        return not self.expired

    def expire(self) -> None:
        self.expired = True

    def describe(self) -> str:
        return "; ".join(
            f"waits for {'parity' if parity else 'phase'} {value} of {b.describe()}" for b, value, parity in self.waits
        )


@dataclass
class NamedBarrier:
    """One of the 16 `bar` resources of a CTA; counts threads."""

    name: str
    clock: Clock
    passed_clock: Clock
    generation: int = 0
    arrived: int = 0
    expected: int | None = None
    waiting: list[str] = field(default_factory=list)
    votes: list[NDArray[np.bool_]] = field(default_factory=list)
    result: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


class BarrierWait(Wait):
    def __init__(self, cta: Cta, barrier: NamedBarrier, generation: int, whole_cta: bool) -> None:
        self.cta = cta
        self.barrier = barrier
        self.generation = generation
        self.whole_cta = whole_cta

    def ready(self) -> bool:
        if self.barrier.generation == self.generation and self.whole_cta:
            self.cta.complete_barrier(self.barrier)  # threads may have exited since
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        barrier = self.barrier
        expected = self.cta.live_threads if self.whole_cta else barrier.expected
        return (
            f"waits at {barrier.name}: {barrier.arrived} of {expected} threads arrived ({', '.join(barrier.waiting)})"
        )


class ClusterWait(Wait):
    def __init__(self, barrier: ClusterBarrier, generation: int) -> None:
        self.barrier = barrier
        self.generation = generation

    def ready(self) -> bool:
        self.barrier.complete()
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        return f"waits at the cluster barrier: {self.barrier.arrived} of {self.barrier.live()} threads arrived"


class ClusterBarrier:
    def __init__(self, ctas: list[Cta], clock: Clock) -> None:
        self.ctas = ctas
        self.clock = clock
        self.passed_clock = clock
        self.arrived = 0
        self.generation = 0

    def live(self) -> int:
        return sum(cta.live_threads for cta in self.ctas)

    def complete(self) -> None:
        if self.arrived and self.arrived >= self.live():
            self.arrived = 0
            self.generation += 1
            self.passed_clock = self.clock.copy()


class LaneWait(Wait):
    """`bar.warp.sync` and other warp collectives reached by only some of the lanes that they name."""

    def __init__(self, warp: Warp, key: int, lanes: int, name: str) -> None:
        self.warp = warp
        self.key = key
        self.lanes = lanes
        self.name = name

    def ready(self) -> bool:
        return False

    def describe(self) -> str:
        here = self.warp.arrived_lanes.get(self.key, 0)
        return f"{self.name} of lanes {self.lanes:#010x}: {here:#010x} arrived"


class ConditionWait(Wait):
    """Waits for a condition of the asynchronous machinery."""

    def __init__(self, condition: Callable[[], bool], text: str) -> None:
        self.condition = condition
        self.text = text

    def ready(self) -> bool:
        return self.condition()

    def describe(self) -> str:
        return self.text
