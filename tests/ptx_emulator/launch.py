"""A launch: modules bound to a device, the scheduler, and the queue of asynchronous operations.

Warps run until they block. Asynchronous operations finish as late as the ISA permits, so that a missing wait shows as
stale data: when no warp can go on, or now and then beside warps that loop. Which one finishes is drawn from a seeded
generator.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import instructions as _instructions  # noqa: F401  registers the handlers
from .architecture import check_instructions, check_launch
from .barriers import Wait
from .codegen import STAY, STORAGE, Compiler
from .counters import Counters
from .disorder import Disorder
from .errors import DeadlockError, EmulatorError
from .ir import Module, Symbol
from .lexer import entry_bodies, without
from .machine import ALL_LANES, AsyncOperation, Cluster, Cta, Fragment, Warp
from .parser import parse
from .program import EXIT, Program, build
from .special import special_register
from .tensor_memory import COLUMNS

if TYPE_CHECKING:
    from .device import Device

Dim3 = tuple[int, int, int]
# Of registers that nothing was written to, one lane in so many is zero.
_ZERO = 8
# Blocks that a fragment runs before the others get their turn, and turns without any effect before giving up.
_SLICE = 2000
_IDLE_ROUNDS = 2000
# Rounds after which a block that lags has its turn, though others can go on: they may poll what it is to write.
_LAG = 100
# CTAs of which `Device.disorder` is a share; of more, that share is spread over them.
_DISTURBED_CTAS = 8
# Instructions of the async proxy.
_ASYNC = (
    ("tcgen05",), ("wgmma",), ("clusterlaunchcontrol",), ("cp", "async", "bulk"), ("cp", "reduce", "async", "bulk"),
    ("st", "async"), ("red", "async"),
)  # fmt: skip


class LoadedModule:
    """A parsed module whose global variables have addresses on a device."""

    def __init__(self, device: Device, text: str) -> None:
        self.device = device
        self._text, self._bodies = text, entry_bodies(text)
        # An entry is parsed when it runs: most of a library's never do.
        self.module: Module = parse(without(text, self._bodies.values()))
        self._programs: dict[str, tuple[Program, Compiler]] = {}
        self._addresses: dict[str, int] = {}
        placed = []
        for variable in self.module.variables.values():
            if variable.space in ("global", "const"):
                region = device.memory.allocate(variable.size or 0, f"variable {variable.name}", variable.align, fill=0)
                self._addresses[variable.name] = region.base
                placed.append((variable, region))
        for variable, region in placed:
            for offset, value in variable.initial:
                data = self.address(value.name) + value.offset if isinstance(value, Symbol) else value
                raw = data.to_bytes(8, "little") if isinstance(data, int) else data
                region.data[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)

    def address(self, name: str) -> int:
        if name not in self._addresses:
            raise EmulatorError(f"unknown symbol {name}")
        return self._addresses[name]

    @property
    def entries(self) -> list[str]:
        return [f.name for f in self.module.functions.values() if f.is_entry and f.defined]

    def program(self, name: str) -> tuple[Program, Compiler]:
        """Entry `name`, split into blocks; compiled code is kept between launches."""
        if name not in self._programs:
            if name not in self.module.functions or not self.module.functions[name].defined:
                raise EmulatorError(f"no entry {name} in the module; it has {', '.join(self.entries)}")
            others = [body for entry, body in self._bodies.items() if entry != name]
            program = build(parse(without(self._text, others)), name)
            check_instructions(program, self.module.target)
            self._programs[name] = (program, Compiler(program, self, special_register))
        return self._programs[name]

    def replace(self, name: str, program: Program, compiler: Compiler) -> None:
        """Entry `name` runs as this program from now on."""
        self._programs[name] = (program, compiler)


def _places(first: Dim3, last: Dim3, step: Dim3) -> Iterator[Dim3]:
    for z in range(first[2], last[2], step[2]):
        for y in range(first[1], last[1], step[1]):
            for x in range(first[0], last[0], step[0]):
                yield x, y, z


@lru_cache(256)
def _lanes_of_garbage(bits: int, seed: int) -> NDArray[Any]:
    raw = np.frombuffer(random.Random(seed).randbytes(32 * 16), np.uint8)
    if bits == 1:
        # In some registers alike, as a warp goes one way then.
        return np.full(32, raw[0] > 127) if raw[1] > 85 else raw[:32] > 127
    zeros = raw[-32:] % _ZERO == 0
    raw = (raw.view(np.uint32) | np.uint32(0x7FC07FC0)).view(np.uint8)
    lanes = raw.view(np.uint64 if bits == 128 else STORAGE[bits])
    if bits == 128:
        return lanes.reshape(32, 2)
    return np.where(zeros, 0, lanes[:32]).astype(lanes.dtype)


def _garbage(widths: list[int], seed: int) -> list[NDArray[Any]]:
    """Registers of these widths that nothing was written to: each others, no addresses, and zero in some lanes, as
    floats not a number in the rest."""
    return [_lanes_of_garbage(bits, seed % 8 + 8 * (index % 13)) for index, bits in enumerate(widths)]


class Launch:
    number = 0

    def __init__(
        self,
        device: Device,
        module: LoadedModule,
        entry: str,
        grid: Dim3,
        block: Dim3,
        params: bytes,
        dynamic_shared: int,
        cluster: Dim3 | None,
        preferred_cluster: Dim3 | None = None,
        non_portable: bool = False,
        programmatic: bool = False,
    ) -> None:
        Launch.number += 1
        self.device = device
        self.program, self.compiler = module.program(entry)
        self.grid, self.block = grid, block
        required = self.program.directives.get("reqnctapercluster")
        self.explicit_cluster = cluster is not None or bool(required)
        self.cluster_shape: Dim3 = cluster or (tuple([*(required or ()), 1, 1, 1][:3]))  # type: ignore[assignment]
        self.dynamic_shared = dynamic_shared
        self.shared_bytes = self.program.static_shared + dynamic_shared
        check_launch(
            self.program, module.module.target, grid, block, self.cluster_shape, cluster is not None, non_portable,
            device.sm_count,
        )  # fmt: skip
        if self.shared_bytes > device.max_shared:
            raise EmulatorError(f"{self.shared_bytes} bytes of shared memory exceed {device.max_shared}")
        if len(params) != self.program.param_bytes:
            raise EmulatorError(f"{entry[:60]} takes {self.program.param_bytes} parameter bytes, got {len(params)}")
        data = np.zeros(-(-max(len(params), 1) // 128) * 128 + 128, np.uint8)
        data = data[-data.ctypes.data % 128 :][: -(-max(len(params), 1) // 64) * 64]
        data[: len(params)] = np.frombuffer(params, np.uint8)
        self.params = device.memory.adopt(data, max(len(params), 1), "kernel parameters", read_only=True)
        self._parameters: dict[tuple[int, np.dtype[Any]], NDArray[Any]] = {}
        self.initial_registers = _garbage([r.bits for r in self.program.registers], device.seed)
        opcodes = {i.opcode for b in self.program.blocks for i in b.instructions}
        self.tracks_proxy = any(opcode[: len(start)] == start for opcode in opcodes for start in _ASYNC)
        self.counters = Counters(self.program)
        self.overlap = device.memory.overlap
        #: Whether earlier launches may run beside this one.
        self.overlaps = self.overlap.start(programmatic) and "early-launches" not in device.tolerated
        self.random = random.Random(device.seed)
        # As much in all of a large grid as in a small one: every disturbance costs rounds in which all others poll.
        share = device.disorder * min(1.0, _DISTURBED_CTAS / (grid[0] * grid[1] * grid[2]))
        self.disorder = Disorder(f"{device.seed} {device.launches}", share)
        self.operations: list[AsyncOperation] = []
        #: Addresses of tensor maps that this launch edited, and of those whose release is missing.
        self.edited_maps: set[int] = set()
        self.unreleased_maps: set[int] = set()
        self.activity = 0
        self.steps = 0
        self.time = 0
        self._idle_states: set[int] = set()
        #: Of each SM: its CTAs, and the columns of tensor memory that they have.
        self._occupied = [0] * device.sm_count
        self.tensor_columns = [np.zeros(COLUMNS, bool) for _ in range(device.sm_count)]
        #: First CTA and shape of the clusters to come.
        self.waiting: deque[tuple[Dim3, Dim3]] = deque(self._clusters(preferred_cluster or self.cluster_shape))

    def _clusters(self, preferred: Dim3) -> Iterator[tuple[Dim3, Dim3]]:
        """In the grid's order; where a preferred cluster would fit, that or the smaller ones in its place."""
        if math.prod(preferred) > self.device.sm_count:
            preferred = self.cluster_shape
        for first in _places((0, 0, 0), self.grid, preferred):
            last: Dim3 = tuple(min(f + p, g) for f, p, g in zip(first, preferred, self.grid, strict=True))  # type: ignore[assignment]
            whole = all(f + p == e for f, p, e in zip(first, preferred, last, strict=True))
            if whole and (preferred == self.cluster_shape or self.random.random() < 0.5):
                yield first, preferred
            else:
                yield from ((place, self.cluster_shape) for place in _places(first, last, self.cluster_shape))

    def parameter(self, offset: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The lanes of a kernel parameter, which is the same for all."""
        found = self._parameters.get((offset, dtype))
        if found is None:
            raw = self.params.slice(self.params.base + offset, dtype.itemsize, "read")
            found = self._parameters[offset, dtype] = np.repeat(raw.view(dtype), 32)
        return found

    # -- asynchronous operations ----------------------------------------------------------------------------------

    def submit(self, run: Callable[[], None], text: str, cta: Cta, queue: object = None) -> AsyncOperation:
        operation = AsyncOperation(run, text, cta, queue)
        self.operations.append(operation)
        self.activity += 1
        return operation

    def tick(self) -> int:
        """Order of fences and operations of the async proxy."""
        self.time += 1
        return self.time

    def _complete_one(self) -> None:
        heads: dict[object, int] = {}
        for index, operation in enumerate(self.operations):
            heads.setdefault(operation.queue if operation.queue is not None else id(operation), index)
        self._complete(self.operations[self.random.choice(list(heads.values()))])

    def _complete(self, operation: AsyncOperation) -> None:
        self.operations.remove(operation)
        try:
            operation.run()
        except EmulatorError as error:
            raise error.at(operation.text) from None
        operation.done = True
        self.activity += 1

    # -- scheduling -----------------------------------------------------------------------------------------------

    def run(self) -> Counters:
        """Run the grid to its end; raises EmulatorError with the place, or DeadlockError with who waits for what."""
        idle = 0
        places = self.device.sm_count * self.device.ctas_per_sm
        live: list[Cluster] = []
        with np.errstate(all="ignore"):
            while live or self.waiting:
                while self.waiting and (not live or sum(self._occupied) + math.prod(self.waiting[0][1]) <= places):
                    self._start(live)
                before = self.activity
                self.disorder.next_round()
                ctas = [cta for cluster in live for cta in cluster.ctas]
                lagging = [cta for cta in ctas if cta.coordinates[0] == self.device.lagging]
                self._turns(cta for cta in ctas if cta not in lagging)
                if self.activity == before or self.disorder.round % _LAG == 0:
                    self._turns(lagging)
                for cluster in [c for c in live if c.finished]:
                    live.remove(cluster)
                    self._finish(cluster)
                if self.activity != before:
                    idle = 0
                    # Copies arrive beside warps that wait in a loop, which never stop being active.
                    if self.operations and self.random.random() < 0.5:
                        self._complete_one()
                elif self.operations and self.random.random() < 0.5:
                    self._complete_one()
                elif self.disorder.skip():
                    continue
                elif self.operations:
                    self._complete_one()
                elif live:
                    idle += 1
                    self._expire(live, idle)
        self.device.memory.free(self.params.base)
        return self.counters

    def _start(self, live: list[Cluster]) -> None:
        cluster = Cluster(self, *self.waiting.popleft())
        for cta in cluster.ctas:
            cta.sm = self._occupied.index(min(self._occupied))
            self._occupied[cta.sm] += 1
        live.append(cluster)
        self.activity += 1

    def _finish(self, cluster: Cluster) -> None:
        for operation in [o for o in self.operations if o.cta in cluster.ctas]:
            if self.device.strict_exit and not operation.committed:
                raise EmulatorError(f"{operation.cta.name} exits with a pending operation: {operation.text}")
            self._complete(operation)
        for cta in cluster.ctas:
            cta.check_register_moves()
            peer = cluster.ctas[cta.rank ^ 1] if cta.rank ^ 1 < cluster.size else cta
            if cta.pair_allocations != peer.pair_allocations:
                raise EmulatorError(
                    f"tcgen05.alloc.cta_group::2 of {cta.pair_allocations} columns by {cta.name}, of "
                    f"{peer.pair_allocations} by its peer"
                )
            if cta.tensor_memory is not None and cta.tensor_memory.allocations:
                raise EmulatorError(f"{cta.name} exits with tensor memory allocated: {cta.tensor_memory.allocations}")
            cta.warps = []
            self._occupied[cta.sm] -= 1

    def _turns(self, ctas: Iterable[Cta]) -> None:
        for cta in ctas:
            for warp in cta.warps:
                for fragment in list(warp.fragments):
                    self._turn(fragment)

    def _turn(self, fragment: Fragment) -> None:
        wait = fragment.wait
        if wait is not None:
            if not wait.ready() or self.disorder.holds(wait):
                return
            if wait.counts_as_progress:
                self.activity += 1
        if fragment not in fragment.warp.fragments:
            return  # merged while this round was under way
        try:
            self._run_fragment(fragment)
        except Exception as error:  # every failure is reported with its place
            item = self.compiler.instruction_at(error)
            place = f"line {item.line}: {item.text}" if item is not None else f"block {fragment.block}"
            where = f"{place}\n  in {fragment.warp.name}, lanes {fragment.lanes:#010x} of {self.program.name[:80]}"
            if isinstance(error, EmulatorError):
                raise error.at(where) from error.__cause__
            raise EmulatorError(f"{type(error).__name__}: {error}").at(where) from error

    def _run_fragment(self, fragment: Fragment) -> None:
        warp: Warp = fragment.warp
        registers, mask = warp.registers, fragment.mask
        full = fragment.lanes == ALL_LANES
        functions = self.compiler.functions[full]
        executions = self.counters.block_executions
        join = fragment.join.block
        block = fragment.block
        for _ in range(_SLICE):
            function = functions[block]
            if function is None:
                function = self.compiler.compile(block, full)
            following = function(warp, fragment, registers, mask)
            if type(following) is not int:
                executions[block] += 1
                targets, reconvergence = following
                warp.diverge(fragment, targets, reconvergence)
                self.activity += 1
                return
            if following == STAY:
                fragment.block = block
                return
            executions[block] += 1
            self.steps += 1
            if following == EXIT:
                warp.exit(fragment)
                self.activity += 1
                return
            block = following
            if block == join:
                fragment.block = block
                warp.arrive_join(fragment)
                self.activity += 1
                return
        fragment.block = block

    def _expire(self, live: list[Cluster], idle: int) -> None:
        """Nothing moves: let waits with a time limit end. Coming back to an earlier state is a deadlock."""
        waits = [(f, f.wait) for c in live for t in c.ctas for w in t.warps for f in w.fragments]
        if idle == 1:
            self._idle_states.clear()
        state = hash(tuple(self._state(fragment) for fragment, _ in waits))
        if state in self._idle_states or idle >= _IDLE_ROUNDS:
            raise DeadlockError(f"deadlock in {self.program.name[:80]}:\n{self._report(waits)}")
        self._idle_states.add(state)
        for _, wait in waits:
            if wait is not None:
                wait.expire()

    def _state(self, fragment: Fragment) -> tuple[int, ...]:
        registers = fragment.warp.registers
        return (fragment.block, fragment.lanes, hash(b"".join(r.tobytes() for r in registers)))

    def _report(self, waits: list[tuple[Fragment, Wait | None]]) -> str:
        lines = []
        for fragment, wait in waits:
            block = self.program.blocks[fragment.block]
            line = f"line {block.instructions[0].line}" if block.instructions else ""
            reason = wait.describe() if wait is not None else "spins without effect"
            lines.append(f"  {fragment.warp.name} lanes {fragment.lanes:#010x} {line}: {reason}")
        return "\n".join(lines)
