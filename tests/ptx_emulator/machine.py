"""The machine that a launch occupies: clusters of CTAs of warps, and fragments of diverged warps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .barriers import ClusterBarrier, MBarrier, NamedBarrier, Wait
from .errors import EmulatorError, MemoryFault
from .memory import OFFSET_MASK, RANK_SHIFT, RESERVED_SHARED, LocalMemory, SharedMemory
from .order import Access, Agents, Clock
from .program import EXIT

if TYPE_CHECKING:
    from .launch import Launch

Mask = NDArray[np.bool_]
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
ALL_LANES = 0xFFFFFFFF
_SM_REGISTERS = 65536


def lane_bits(mask: Mask) -> int:
    """A lane mask as an integer, lane 0 in the lowest bit."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


@lru_cache(4096)
def lane_mask(bits: int) -> Mask:
    mask: Mask = (_BITS & np.uint32(bits)) != 0
    return mask


@lru_cache(1024)
def thread_ids(warp: int, block: tuple[int, int, int]) -> tuple[NDArray[np.uint32], ...]:
    """%tid of a warp's lanes."""
    thread = np.arange(32, dtype=np.uint32) + np.uint32(32 * warp)
    x, y, _ = block
    return thread % np.uint32(x), thread // np.uint32(x) % np.uint32(y), thread // np.uint32(x * y)


class Join:
    """Where diverged fragments meet: the branch's immediate post-dominator."""

    def __init__(self, block: int, parent: Join | None) -> None:
        self.block = block
        self.parent = parent
        self.running = 0
        self.lanes = 0


class Fragment:
    """The lanes of a warp that execute together."""

    __slots__ = ("block", "join", "lanes", "mask", "peeked_in_vain", "state", "wait", "warp")

    def __init__(self, warp: Warp, lanes: int, block: int, join: Join) -> None:
        self.warp = warp
        self.lanes = lanes
        self.mask = lane_mask(lanes)
        self.block = block
        self.join = join
        self.wait: Wait | None = None
        self.state: Any = None
        self.peeked_in_vain = False


class Warp:
    def __init__(self, cta: Cta, index: int, registers: list[Any], live: int) -> None:
        self.cta = cta
        self.index = index
        self.id = cta.rank * cta.warp_count + index
        self.registers = registers
        self.live = live
        self.exited = 0
        #: The phase in which each mbarrier was when this warp last saw that another was over.
        self.seen_phases: dict[MBarrier, int] = {}
        #: Tensor maps as this warp's copies may see them, by address.
        self.tensor_maps: dict[int, bytes] = {}
        #: mbarriers that this warp initialised and that no fence of it made visible to the async proxy.
        self.unfenced_mbarriers: list[MBarrier] = []
        self.arrived_lanes: dict[int, int] = {}
        self.cluster_generation = -1
        self.clock = np.zeros(cta.cluster.agents.count, np.int64)
        self.clock[self.id] = 1
        self.copies: list[Callable[[], None]] = []
        self.copy_groups: list[list[Callable[[], None]]] = []
        self.bulk_open: dict[int, list[Any]] = {}
        self.bulk_groups: dict[int, list[list[Any]]] = {}
        self.tensor_stores: list[tuple[set[int], Callable[[], None]]] = []  # columns, what writes them
        self.wgmma_open: list[Callable[[], None]] = []
        self.wgmma_groups: list[list[Callable[[], None]]] = []
        #: What this warp issued of each kind, as epochs of its agents: groups of bulk copies by lane, groups of wgmma,
        #: loads and stores of tensor memory, tcgen05 operations.
        self.bulk_committed: dict[int, int] = {}
        self.wgmma_committed = 0
        self.tensor_loads = 0
        self.loaded_at = 0  # the epoch behind the last of them
        self.tensor_stored = 0
        self.tensor_operations = 0
        root = Join(EXIT, None)
        root.running = 1
        self.fragments = [Fragment(self, live, 0, root)]
        self.tid = thread_ids(index, cta.launch.block)

    @cached_property
    def local(self) -> LocalMemory:
        return LocalMemory(self.cta.launch.program.local_size)

    @property
    def name(self) -> str:
        return f"{self.cta.name} warp {self.index}"

    def mbarrier(self, address: int, by_async: bool = False) -> MBarrier:
        """The one at a shared (cluster) address that this warp, or what it issues, uses; see MBarrier.check_seen."""
        found = self.cta.mbarrier(address)
        found.check_seen(self, by_async)
        return found

    def release(self, clock: NDArray[np.int64]) -> None:
        """Publish what this warp did before, then start a new epoch."""
        np.maximum(clock, self.clock, out=clock)
        self.clock[self.id] += 1

    def acquire(self, clock: NDArray[np.int64]) -> None:
        own = self.clock[self.id]
        np.maximum(self.clock, clock, out=self.clock)
        self.clock[self.id] = own

    def issue(self, kind: str, epoch: int, issued: int = 0) -> Access:
        """An asynchronous operation of this warp: what the warp does from now on comes in no order with it."""
        agent = self.cta.cluster.agents.of(kind, self.id)
        access = Access(agent, epoch, self.hand_over(), issued)
        access.clock[agent] = epoch  # after what it issued before
        return access

    def bulk_access(self, lane: int, clock: Clock, issued: int) -> Access:
        """A read by a copy of the lane's next group."""
        agent = self.cta.cluster.agents.of("bulk copies", self.id)
        return Access(agent, self.bulk_committed.get(lane, 0) + 1, clock, issued)

    def after_own_stores(self) -> Clock:
        """What a load of tensor memory comes after: this warp's own stores too, waited for or not."""
        clock = self.clock.copy()
        clock[self.cta.cluster.agents.of("tcgen05.st", self.id)] = self.tensor_stored
        return clock

    def see(self, kind: str, epoch: int, of: Warp | None = None) -> None:
        """What this warp, or another, issued is done, up to an epoch of its agent."""
        agent = self.cta.cluster.agents.of(kind, (of or self).id)
        self.clock[agent] = max(epoch, int(self.clock[agent]))

    def hand_over(self) -> Clock:
        """What an operation that is issued now comes after."""
        clock = self.clock.copy()
        self.clock[self.id] += 1
        return clock

    def diverge(self, fragment: Fragment, targets: list[tuple[int, int]], reconvergence: int) -> None:
        """Replace a fragment by one per (block, lanes)."""
        join = fragment.join
        if reconvergence != join.block:
            parent = join
            join = Join(reconvergence, parent)
        else:
            join.running -= 1
        self.fragments.remove(fragment)
        join.running += len(targets)
        parts = [Fragment(self, lanes, block, join) for block, lanes in targets]
        self.fragments += parts
        for part in parts:
            if part.block == reconvergence:
                self.arrive_join(part)

    def arrive_join(self, fragment: Fragment) -> None:
        """A fragment reached its reconvergence point, or its lanes exited (lanes = 0)."""
        self.fragments.remove(fragment)
        join: Join | None = fragment.join
        lanes = fragment.lanes
        while join is not None:
            join.running -= 1
            join.lanes |= lanes
            if join.running:
                return
            lanes = join.lanes
            if lanes and join.parent is not None:
                self.fragments.append(Fragment(self, lanes, join.block, join.parent))
                return
            join = join.parent

    def exit(self, fragment: Fragment) -> None:
        self.exited |= fragment.lanes
        self.cta.live_threads -= fragment.lanes.bit_count()
        pending = self.copies or any(self.copy_groups)
        if pending and self.exited == self.live and self.cta.launch.device.strict_exit:
            raise EmulatorError(f"{self.name} exits with pending cp.async copies")
        fragment.lanes = 0
        self.arrive_join(fragment)
        for key, arrived in list(self.arrived_lanes.items()):
            self.release_lanes(key, arrived)

    def release_lanes(self, key: int, arrived: int) -> None:
        """Let a warp collective go on when every lane that it names and that lives has arrived."""
        waiting = [f for f in self.fragments if f.wait is not None and getattr(f.wait, "key", None) == key]
        if waiting and arrived & ~self.exited == waiting[0].wait.lanes & ~self.exited:  # type: ignore[union-attr]
            del self.arrived_lanes[key]
            for fragment in waiting:
                fragment.wait = None
                fragment.state = "released"


class Cta:
    def __init__(self, launch: Launch, cluster: Cluster, rank: int, coordinates: tuple[int, int, int]) -> None:
        self.launch = launch
        self.cluster = cluster
        self.rank = rank
        self.coordinates = coordinates
        self.name = f"CTA {coordinates}" + (f" rank {rank}" if cluster.size > 1 else "")
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.warp_count = -(-threads // 32)
        self.live_threads = threads
        self.thread_count = threads
        name = f"shared memory of {self.name}"
        self.shared = SharedMemory(rank, launch.shared_bytes, name, cluster.agents, launch.device.tolerated)
        self.shared_base = (rank << RANK_SHIFT) + RESERVED_SHARED
        clocks = np.zeros((16, cluster.agents.count), np.int64)
        self.barriers = [NamedBarrier(f"barrier {i} of {self.name}", clocks[i], clocks[i]) for i in range(16)]
        self.mbarriers: dict[int, MBarrier] = {}
        self.sm = 0
        self.tensor_memory: Any = None
        #: Columns of each tcgen05.alloc.cta_group::2, which one warp of each CTA of a pair performs.
        self.pair_allocations: list[int] = []
        self.constants: dict[Any, Any] = {}
        self.warps: list[Warp] = []
        #: Of a thread of each warp, as setmaxnreg left them, and the counts that it gave.
        self.warp_registers = [self.register_pool // (32 * self.warp_count)] * self.warp_count
        self.register_moves: list[list[int]] = [[] for _ in range(self.warp_count)]

    @property
    def register_pool(self) -> int:
        """Registers of the CTA: as many as ptxas may give each thread of a kernel of this size, in steps of 8."""
        directives = self.launch.program.directives
        limit = directives.get("maxntid") or directives.get("reqntid")
        threads = math.prod(limit) if limit else 32 * self.warp_count
        (resident,) = directives.get("minnctapersm", (1,))
        return min(_SM_REGISTERS // (threads * resident) // 8 * 8, 255) * 32 * self.warp_count

    def move_registers(self, warp: int, count: int) -> None:
        """Every warp of a warpgroup runs the same setmaxnreg."""
        moves = self.register_moves[warp]
        moves.append(count)
        for other in self.register_moves[warp // 4 * 4 : warp // 4 * 4 + 4]:
            if other[len(moves) - 1 : len(moves)] not in ([], [count]):
                raise EmulatorError(f"setmaxnreg {count} of warp {warp} of {self.name}, {other[-1]} of its warpgroup")

    def check_register_moves(self) -> None:
        for first in range(0, self.warp_count, 4):
            counts = [len(moves) for moves in self.register_moves[first : first + 4]]
            if len(set(counts)) > 1:
                raise EmulatorError(f"{self.name}: setmaxnreg ran {counts} times in the warps from {first} on")

    def start(self) -> None:
        registers = self.launch.initial_registers
        for index in range(self.warp_count):
            lanes = min(32, self.thread_count - 32 * index)
            self.warps.append(Warp(self, index, list(registers), ALL_LANES >> (32 - lanes)))

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared (cluster) address; raises EmulatorError if none was initialised there."""
        cta = self.peer(address)
        found = cta.mbarriers.get(address & OFFSET_MASK)
        if found is None:
            raise EmulatorError(f"no mbarrier was initialised at shared address {address:#x} of {cta.name}")
        return found

    def peer(self, address: int) -> Cta:
        rank = address >> RANK_SHIFT
        if rank == self.rank:
            return self
        if rank >= len(self.cluster.ctas):
            raise MemoryFault(f"shared address {address:#x} names CTA rank {rank} of a cluster of {self.cluster.size}")
        other = self.cluster.ctas[rank]
        if other.gone:
            raise MemoryFault(f"shared address {address:#x} is of {other.name}, which has exited")
        return other

    def complete_barrier(self, barrier: NamedBarrier) -> None:
        """Open a named barrier if all expected threads are there."""
        expected = barrier.expected if barrier.expected is not None else self.live_threads
        if barrier.arrived and barrier.arrived >= expected:
            if barrier.arrived > expected:
                raise EmulatorError(f"{barrier.name}: {barrier.arrived} threads arrived, {expected} expected")
            barrier.arrived = 0
            barrier.expected = None
            barrier.waiting = []
            barrier.generation += 1
            barrier.passed_clock = barrier.clock.copy()
            if barrier.votes:
                barrier.result = np.concatenate(barrier.votes)
                barrier.votes = []

    @property
    def finished(self) -> bool:
        return self.live_threads == 0

    @property
    def gone(self) -> bool:
        """Its shared memory may be another's by now."""
        return self.finished and self.launch.device.strict_exit


@dataclass(eq=False)
class AsyncOperation:
    """An operation of the async proxy: `run` performs it; those of one `queue` finish in order.

    Stores in a committed bulk group may outlive their CTA, whose shared memory hardware then keeps (CUTLASS's epilogues
    end so); whatever else is pending when a CTA exits is an error.
    """

    run: Callable[[], None]
    text: str
    cta: Cta
    queue: object = None
    done: bool = False
    committed: bool = False


class Cluster:
    def __init__(self, launch: Launch, first: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
        self.size = shape[0] * shape[1] * shape[2]
        self.first = first
        self.shape = shape
        warps = -(-(launch.block[0] * launch.block[1] * launch.block[2]) // 32)
        self.agents = Agents(warps * self.size, self.size, not launch.tracks_proxy)
        self.mbarrier_phases = np.zeros(self.agents.count, np.int64)
        #: Whether a thread was told that no cluster is left to take over (PTX ISA, "clusterlaunchcontrol.try_cancel").
        self.saw_the_last = False
        self.ctas: list[Cta] = []
        for rank in range(self.size):
            x, y, z = rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1])
            self.ctas.append(Cta(launch, self, rank, (first[0] + x, first[1] + y, first[2] + z)))
        self.barrier = ClusterBarrier(self.ctas, np.zeros(self.agents.count, np.int64))
        for cta in self.ctas:
            cta.start()

    @property
    def finished(self) -> bool:
        return all(cta.finished for cta in self.ctas)
