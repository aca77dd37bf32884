"""Tensor memory of one CTA: 128 lanes by 512 columns of 32 bits, its allocation, and its transfers to registers.

An address is lane << 16 | column. Fragment layouts: PTX ISA "Data movement shape"; checked against CuTe's copy atoms.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptx_emulator.errors import EmulatorError, MemoryFault, RaceError, UnknownInstructionError
from ptx_emulator.order import Access, Agents, Clock, History

LANES, COLUMNS = 128, 512
_ROWS = 16  # lanes that the race check tells apart together: no transfer reaches fewer
GRANULE = 32  # columns; allocations are powers of two of at least this

Index = NDArray[np.int64]

# Registers per repetition of each shape, and the columns a repetition spans.
_SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}


def _places(lanes: Index, columns: Index) -> Index:
    """The elements of the race check's history."""
    return np.unique(lanes // _ROWS * COLUMNS + columns)


class TensorMemory:
    """Cells, which of them were written, and which columns are allocated.

    Reads of cells that were never written, and accesses outside an allocation, raise MemoryFault. `taken`: what columns
    of the SM its CTAs have.
    """

    def __init__(self, agents: Agents | None = None, taken: NDArray[np.bool_] | None = None) -> None:
        self.taken = taken if taken is not None else np.zeros(COLUMNS, bool)
        self.history = History(LANES // _ROWS * COLUMNS, agents) if agents is not None else None
        self.cells = np.zeros((LANES, COLUMNS), np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.allocated = np.zeros(COLUMNS, bool)
        self.may_allocate = True

    def allocate(self, columns: int) -> int | None:
        """`tcgen05.alloc`: the address of a free range, or None where the warp has to wait for one."""
        if columns not in (32, 64, 128, 256, 512):
            raise EmulatorError(f"tcgen05.alloc of {columns} columns: a power of two in [32, 512] is needed")
        if not self.may_allocate:
            raise EmulatorError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for start in range(0, COLUMNS - columns + 1, GRANULE):
            if not self.taken[start : start + columns].any():
                self.allocated[start : start + columns] = self.taken[start : start + columns] = True
                self.written[:, start : start + columns] = False
                if self.history is not None:
                    self.history.forget(_places(np.arange(LANES)[:, None], np.arange(start, start + columns)))
                self.allocations[start] = columns
                return start
        return None

    def free(self, address: int, columns: int, clock: Clock | None = None) -> None:
        """`tcgen05.dealloc` of exactly one allocation, by a warp with this clock: a write of all of it."""
        if self.allocations.get(address) != columns:
            raise MemoryFault(f"tcgen05.dealloc of {columns} columns at {address:#x}; allocated: {self.allocations}")
        if self.history is not None and clock is not None:
            every = np.arange(address, address + columns)
            conflict = self.history.conflict(_places(np.arange(LANES)[:, None], every), clock)
            if conflict is not None:
                raise self._race(every, "tcgen05.dealloc frees", *conflict)
        del self.allocations[address]
        self.allocated[address : address + columns] = self.taken[address : address + columns] = False

    def _check(self, lanes: Index, columns: Index, what: str) -> None:
        if lanes.min() < 0 or lanes.max() >= LANES or columns.min() < 0 or columns.max() >= COLUMNS:
            raise MemoryFault(f"{what}: lanes to {lanes.max()}, columns to {columns.max()} are outside tensor memory")
        if not self.allocated[columns].all():
            column = int(columns[~self.allocated[columns]].min())
            raise MemoryFault(f"{what}: column {column} is not allocated; allocated: {self.allocations}")

    def read(self, lanes: Index, columns: Index, what: str, access: Access | None = None) -> NDArray[np.uint32]:
        """Cells at broadcast index arrays; `what` names the reader in a fault."""
        lanes, columns = np.broadcast_arrays(lanes, columns)
        self._check(lanes, columns, what)
        if self.history is not None and access is not None:
            writer = self.history.read(_places(lanes, columns), access.agent, access.epoch, access.clock)
            if writer is not None:
                raise self._race(columns, f"{what} reads", writer, "wrote")
        written = self.written[lanes, columns]
        if not written.all():
            lane, column = int(lanes[~written][0]), int(columns[~written][0])
            raise MemoryFault(f"{what}: tensor memory lane {lane}, column {column} was never written")
        return self.cells[lanes, columns]

    def write(
        self, lanes: Index, columns: Index, values: NDArray[np.uint32], what: str, access: Access | None = None
    ) -> None:
        """Set cells at broadcast index arrays."""
        lanes, columns = np.broadcast_arrays(lanes, columns)
        self._check(lanes, columns, what)
        if self.history is not None and access is not None:
            places = _places(lanes, columns)
            conflict = self.history.conflict(places, access.clock)
            if conflict is not None:
                raise self._race(columns, f"{what} writes", *conflict)
            self.history.write(places, access.agent, access.epoch)
        self.cells[lanes, columns] = values
        self.written[lanes, columns] = True

    def _race(self, columns: Index, access: str, other: str, what: str) -> RaceError:
        return RaceError(
            f"{access} tensor memory in columns {columns.min()}..{columns.max()}, which {other} {what} with no barrier "
            "or wait between"
        )

    def load(
        self, address: int, warp: int, shape: str, count: int, pack: bool = False, split: int = 0,
        access: Access | None = None,
    ) -> NDArray[np.uint32]:  # fmt: skip
        """`tcgen05.ld`: registers [n, 32] of a warp.

        warp: index in the CTA, which fixes the quarter of the lanes it may touch. count: the .xN. pack: two 16-bit
        columns per register. split: the column offset of the upper half of .16x32bx2.
        """
        lanes, columns = self._fragment(address, warp, shape, count, pack, split)
        what = f"tcgen05.ld.{shape}.x{count}"
        if not pack:
            return self.read(lanes, columns, what, access)
        low, high = (self.read(lanes, columns + i, what, access) & np.uint32(0xFFFF) for i in (0, 1))
        return low | high << np.uint32(16)

    def store(
        self,
        address: int,
        warp: int,
        shape: str,
        count: int,
        registers: NDArray[np.uint32],
        unpack: bool = False,
        split: int = 0,
        access: Access | None = None,
    ) -> None:
        """`tcgen05.st`: the inverse of `load`; unpack puts each half of a register into a column of its own."""
        lanes, columns = self._fragment(address, warp, shape, count, unpack, split)
        what = f"tcgen05.st.{shape}.x{count}"
        if not unpack:
            self.write(lanes, columns, registers, what, access)
            return
        for i in (0, 1):
            self.write(lanes, columns + i, registers >> np.uint32(16 * i) & np.uint32(0xFFFF), what, access)

    def columns(self, address: int, warp: int, shape: str, count: int, packed: bool, split: int) -> set[int]:
        """That a `load` or `store` touches."""
        _, columns = self._fragment(address, warp, shape, count, packed, split)
        return {int(c) + i for c in np.unique(columns) for i in range(2 if packed else 1)}

    def _fragment(
        self, address: int, warp: int, shape: str, count: int, packed: bool, split: int
    ) -> tuple[Index, Index]:
        if shape not in _SHAPES:
            raise UnknownInstructionError(f"tcgen05.ld/st shape .{shape} is not modelled; known: {', '.join(_SHAPES)}")
        lane, column = address >> 16, address & 0xFFFF
        quarter = warp % 4
        if lane // 32 != quarter or lane % (32 if shape == "32x32b" else 16):
            raise MemoryFault(
                f"tcgen05.ld/st.{shape}: warp {warp} may start at lane {32 * quarter}"
                f"{'' if shape == '32x32b' else f' or {32 * quarter + 16}'}, the address says lane {lane}"
            )
        lanes, columns, upper = fragment(shape, count)
        return lane + lanes, column + columns * (2 if packed else 1) + upper * split


@dataclass(frozen=True)
class TensorPort:
    """Tensor memory as an asynchronous operation meets it."""

    memory: TensorMemory
    access: Access

    def read(self, lanes: Index, columns: Index, what: str) -> NDArray[np.uint32]:
        return self.memory.read(lanes, columns, what, self.access)

    def write(self, lanes: Index, columns: Index, values: NDArray[np.uint32], what: str) -> None:
        self.memory.write(lanes, columns, values, what, self.access)


@lru_cache
def fragment(shape: str, count: int) -> tuple[Index, Index, Index]:
    """(lane, column, upper half?) of [register, thread], relative to the address; `upper` is for .16x32bx2."""
    per_repetition, span = _SHAPES[shape]
    register, thread = np.mgrid[: per_repetition * count, :32]
    repetition, part = np.divmod(register, per_repetition)
    upper = np.zeros_like(register)
    if shape == "32x32b":
        lanes, columns = thread, part
    elif shape == "16x64b":
        lanes, columns = thread // 4 + 8 * (thread % 2), thread // 2 % 2
    elif shape == "16x128b":
        lanes, columns = thread // 4 + 8 * part, thread % 4
    elif shape == "16x256b":
        lanes, columns = thread // 4 + 8 * (part // 2), 2 * (thread % 4) + part % 2
    else:
        lanes, columns, upper = thread % 16, part, thread // 16
    return lanes, columns + repetition * span, upper
