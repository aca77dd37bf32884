"""Which accesses of a memory are ordered: vector clocks over everything that reads or writes on its own.

Each such agent counts epochs. A clock holds, for every agent, up to which epoch its accesses come before what the
clock's owner does next; barriers, mbarriers and waits join clocks. Two accesses of one element, one of them a write,
that no clock orders are a race, whatever the schedule (as in FastTrack, Flanagan and Freund 2009).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError

Clock = NDArray[np.int64]
Lanes = NDArray[Any]

_KINDS = ("warp", "bulk copies", "wgmma", "tcgen05.ld", "tcgen05.st", "tcgen05 operations")
_MBARRIERS = 128  # of a CTA


class Agents:
    """The agents of a cluster. Each warp is six: itself, what it reads by bulk copies and by wgmma, its transfers of
    tensor memory in either direction, its tcgen05 operations. Copies that complete on an mbarrier are that mbarrier's.

    simple: the kernel has none of these but warps.
    """

    def __init__(self, warps: int, ctas: int, simple: bool) -> None:
        self.warps = warps
        self.simple = simple
        own = warps if simple else len(_KINDS) * warps + _MBARRIERS * ctas
        #: Of what earlier launches do: in a clock, whether they were waited for (see dependent_launch.py).
        self.launches = own
        self.count = own + 1
        self._mbarriers: dict[tuple[int, int], int] = {}

    def of(self, kind: str, warp: int) -> int:
        return _KINDS.index(kind) * self.warps + warp

    def mbarrier(self, rank: int, offset: int) -> int | None:
        """Of the mbarrier at an offset of a CTA's shared memory, the same when it is initialised again."""
        if self.simple:
            return None
        agent = len(_KINDS) * self.warps + self._mbarriers.setdefault((rank, offset), len(self._mbarriers))
        if agent >= self.launches:
            raise EmulatorError(f"more than {_MBARRIERS} mbarriers in a CTA are not modelled")
        return agent

    def name(self, agent: int) -> str:
        kind, warp = divmod(agent, self.warps)
        if kind == 0:
            return f"warp {warp}"
        if kind < len(_KINDS):
            return f"{_KINDS[kind]} of warp {warp}"
        where = next(w for w, i in self._mbarriers.items() if i + len(_KINDS) * self.warps == agent)
        return f"a copy that completes on the mbarrier at {where[1]:#x} of CTA rank {where[0]}"


@dataclass(frozen=True)
class Access:
    """What an asynchronous operation does: its agent and the epoch of that, which a later wait publishes; what its
    issuer had seen; when it was issued, in the order of proxy fences."""

    agent: int
    epoch: int
    clock: Clock
    issued: int


class History:
    """Of every element of a memory: who wrote it last, and when each agent read it last.

    `writer` holds an epoch above the agent; 0 is ordered before everything. Accesses of parts of an element are noted,
    not checked: others may have the other parts.
    """

    def __init__(self, elements: int, agents: Agents) -> None:
        self.agents = agents
        self.elements = elements
        self.writer = np.zeros(elements, np.int64)
        self.last_write = np.zeros(agents.count, np.int64)
        self.last_read = np.zeros(agents.count, np.int64)
        self.in_parts = np.zeros(elements, np.bool_)
        self._reads: dict[int, NDArray[np.int64]] = {}

    def read(self, where: Lanes, agent: int, epoch: int, clock: Clock, of_parts: bool = False) -> str | None:
        """Note a read of elements by an agent; returns who wrote one of them with no order between."""
        if of_parts:
            self.in_parts[where] = True
        found = self._unseen_writer(where, clock) if 1 in (self.last_write > clock).tobytes() else None
        reads = self._reads.get(agent)
        if reads is None:
            reads = self._reads[agent] = np.zeros(self.elements, np.int64)
        reads[where] = epoch
        self.last_read[agent] = epoch
        return found

    def conflict(self, where: Lanes, clock: Clock) -> tuple[str, str] | None:
        """Who read or wrote elements ("reads", "writes") with no order before a write under this clock."""
        unseen = self.last_read > clock
        if 1 in unseen.tobytes():
            for agent in np.flatnonzero(unseen).tolist():
                if ((self._reads[agent][where] > clock[agent]) & ~self.in_parts[where]).any():
                    return self.agents.name(agent), "reads"
        if 1 in (self.last_write > clock).tobytes():
            writer = self._unseen_writer(where, clock)
            if writer is not None:
                return writer, "writes"
        return None

    def write(self, where: Lanes, agent: int, epoch: int, of_parts: bool = False) -> None:
        self.in_parts[where] = of_parts
        self.writer[where] = epoch << 16 | agent
        self.last_write[agent] = max(epoch, int(self.last_write[agent]))

    def forget(self, where: Any) -> None:
        """What is written there is ordered before everything."""
        self.writer[where] = 0
        for reads in self._reads.values():
            reads[where] = 0

    def _unseen_writer(self, where: Lanes, clock: Clock) -> str | None:
        stamp = self.writer[where]
        unseen = (stamp >> 16 > clock[stamp & 0xFFFF]) & ~self.in_parts[where]
        return self.agents.name(int(stamp[unseen].flat[0]) & 0xFFFF) if unseen.any() else None
