"""Memory spaces: what the checker knows about every byte lives beside the byte."""

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dependent_launch import Overlap, Stamps
from .errors import MemoryFault, ProxyFenceError, RaceError
from .order import Access, Agents, Clock, History

Bytes = NDArray[np.uint8]
Lanes = NDArray[Any]

# Windows of the generic address space; device allocations lie at their host addresses, far below.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 1 << 57
# A shared address is CTA rank << 24 | offset, as on hardware: CUTLASS clears bit 24 to reach the even CTA of a pair.
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# The system's reserved bytes at the start of shared memory, so that address 0 is never valid.
RESERVED_SHARED = 1024
_GUARD = 512
_NEVER = 0xFFFFFFFF
_UNSIGNED: dict[int, Any] = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)}
_bitor = np.bitwise_or.reduce


def _elements(data: Bytes, size: int) -> NDArray[Any]:
    """Bytes as elements of `size`, one for what a lane accesses: numpy gathers those fast."""
    return data[: len(data) // size * size].view(_UNSIGNED.get(size) or np.dtype(f"V{size}"))


def _cells(index: Lanes, size: int) -> Lanes:
    """The cells of the history, of two bytes each, that elements of a size are in."""
    if size <= 2:
        return index if size == 2 else index // 2
    return (index[:, None] * (size // 2) + np.arange(size // 2)).reshape(-1)


def wide_rows(offsets: NDArray[np.int64], count: int) -> tuple[int, NDArray[np.int64]]:
    """(width, index [n, count / width]) of rows of `count` bytes: in 8-byte elements where they are aligned."""
    width = 1 if (count | int(_bitor(offsets))) & 7 else 8
    return width, offsets[:, None] // width + np.arange(count // width)


class Region:
    """Contiguous bytes addressed from `base`."""

    def __init__(self, data: Bytes, base: int, size: int, name: str, read_only: bool = False) -> None:
        self.data = data
        self.base = base
        self.size = size
        self.name = name
        self.read_only = read_only
        self.touched: NDArray[np.bool_] | None = None  # which bytes were read or written, where someone asked
        self.stamps: Stamps | None = None  # of device memory
        self._views: dict[int, NDArray[Any]] = {}
        self._limits: dict[tuple[int, int], tuple[NDArray[Any], ...]] = {}

    def view(self, size: int) -> NDArray[Any]:
        """The bytes as elements of a size."""
        found = self._views.get(size)
        if found is None:
            found = self._views[size] = _elements(self.data, size)
        return found

    def index(self, addresses: Lanes, size: int) -> NDArray[np.int64] | None:
        """The elements of `size` bytes at addresses; None where one is outside or misaligned."""
        key = (addresses.itemsize, size)
        if size > self.size:
            return None
        if key not in self._limits:
            bits, shift = 8 * addresses.itemsize, size.bit_length() - 1
            values = (self.base, self.size - size, bits - shift, shift)
            self._limits[key] = tuple(np.array(value, addresses.dtype) for value in values)
        base, last, raised, shift_by = self._limits[key]
        offsets = addresses - base
        # What misalignment leaves in the low bits, moved to the top, is beyond every limit too.
        if 1 in ((offsets if size == 1 else offsets | offsets << raised) > last).tobytes():
            return None
        index: NDArray[np.int64] = (offsets >> shift_by).astype(np.int64)
        return index

    def refuse(self, addresses: Lanes, size: int, action: str) -> MemoryFault:
        """Names the first address that `index` found bad."""
        for address in addresses.tolist():
            offset = (address - self.base) % (1 << 8 * addresses.itemsize)
            if offset + size > self.size:
                break
            if offset % size:
                return MemoryFault(f"misaligned {action} of {size} bytes at {address:#x} in {self.name}")
        return MemoryFault(
            f"{action} of {size} bytes at {address:#x} is outside {self.name} "
            f"[{self.base:#x}, {self.base + self.size:#x})"
        )

    def gather(self, index: Lanes, width: int, count: int) -> NDArray[Any]:
        """Elements of `count` values of `width` bytes: [lanes] or [lanes, count]."""
        loaded = self.view(width * count)[index]
        return loaded if count == 1 else loaded.view(_UNSIGNED[width]).reshape(-1, count)

    def scatter(self, index: Lanes, values: NDArray[Any], size: int) -> None:
        elements = self.view(size)
        elements[index] = values if values.ndim == 1 else np.ascontiguousarray(values).view(elements.dtype)[:, 0]

    def load(self, addresses: Lanes, width: int, count: int) -> NDArray[Any]:
        index = self.index(addresses, width * count)
        if index is None:
            raise self.refuse(addresses, width * count, "read")
        if self.touched is not None:
            self.touch(index * (width * count), width * count)
        if self.stamps is not None:
            self.stamps.read(index, width * count)
        return self.gather(index, width, count)

    def store(self, addresses: Lanes, values: NDArray[Any], width: int, count: int) -> None:
        if self.read_only:
            raise MemoryFault(f"write to read-only {self.name} at {int(addresses[0]):#x}")
        index = self.index(addresses, width * count)
        if index is None:
            raise self.refuse(addresses, width * count, "write")
        if self.touched is not None:
            self.touch(index * (width * count), width * count)
        if self.stamps is not None:
            self.stamps.write(index, width * count)
        self.scatter(index, values, width * count)

    def slice(self, address: int, size: int, action: str) -> Bytes:
        offset = address - self.base
        if offset < 0 or offset + size > self.size:
            raise self.refuse(np.array([address], np.uint64), size, action)
        if self.touched is not None:
            self.touched[offset : offset + size] = True
        return self.data[offset : offset + size]

    def touch(self, offsets: NDArray[Any], count: int) -> None:
        """`count` bytes from each offset are read or written."""
        if self.touched is not None:
            self.touched[offsets.astype(np.int64)[:, None] + np.arange(count)] = True


class GlobalMemory:
    """Allocations at their host addresses, each between guard bytes.

    With `count_distinct`, `distinct` adds up how many bytes of the allocations freed since were touched at all: what a
    perfect cache would move.
    """

    def __init__(self) -> None:
        self.count_distinct = False
        self.distinct = 0
        self.overlap = Overlap()
        self._bases: list[int] = []
        self._regions: list[Region] = []

    def allocate(self, size: int, name: str = "allocation", align: int = 256, fill: int = 0xFF) -> Region:
        """A new region; unwritten bytes are 0xFF (NaN in every float format) unless `fill` says otherwise."""
        padded = -(-max(size, 1) // 64) * 64
        buffer = np.full(padded + 2 * _GUARD + align, fill, np.uint8)
        start = -(-(buffer.ctypes.data + _GUARD) // align) * align - buffer.ctypes.data
        return self.adopt(buffer[start : start + padded], size, name)

    def adopt(self, data: Bytes, size: int, name: str, read_only: bool = False) -> Region:
        """Make a host buffer visible to kernels at its own address."""
        region = Region(data, data.ctypes.data, size, f"{name} ({size} bytes)", read_only)
        region.stamps = None if read_only else Stamps(size, region.name, self.overlap)
        if self.count_distinct:
            region.touched = np.zeros(size, np.bool_)
        index = bisect.bisect(self._bases, region.base)
        self._bases.insert(index, region.base)
        self._regions.insert(index, region)
        return region

    def free(self, base: int) -> None:
        index = bisect.bisect_left(self._bases, base)
        if index == len(self._bases) or self._bases[index] != base:
            raise MemoryFault(f"free of {base:#x}, which is no allocation")
        touched = self._regions[index].touched
        if touched is not None:
            self.distinct += int(touched.sum())
        del self._bases[index], self._regions[index]

    def region(self, address: int) -> Region:
        index = bisect.bisect(self._bases, address) - 1
        if index >= 0:
            region = self._regions[index]
            if address - region.base < region.size:
                return region
        nearest = f"; the allocation below is {self._regions[index].name}" if index >= 0 else ""
        raise MemoryFault(f"global address {address:#x} lies in no allocation{nearest}")

    def split(self, addresses: Lanes) -> list[tuple[Region, NDArray[np.bool_] | None]]:
        """The regions that the lanes touch, with which lanes (None: all)."""
        region = self.region(int(addresses[0]))
        if region.index(addresses, 1) is not None:
            return [(region, None)]
        inside = (addresses - addresses.dtype.type(region.base)) < region.size
        parts: list[tuple[Region, NDArray[np.bool_] | None]] = [(region, inside)]
        rest = ~inside
        while rest.any():
            region = self.region(int(addresses[rest][0]))
            inside = rest & ((addresses - addresses.dtype.type(region.base)) < region.size)
            parts.append((region, inside))
            rest &= ~inside
        return parts

    def load(self, addresses: Lanes, width: int, count: int) -> NDArray[Any]:
        region = self.region(int(addresses[0]))
        index = region.index(addresses, width * count)
        if index is not None and region.touched is None:
            if region.stamps is not None:
                region.stamps.read(index, width * count)
            return region.gather(index, width, count)
        parts = self.split(addresses)
        if parts[0][1] is None:
            return parts[0][0].load(addresses, width, count)
        shape: tuple[int, ...] = (len(addresses),) if count == 1 else (len(addresses), count)
        out = np.empty(shape, _UNSIGNED[width])
        for region, lanes in parts:
            out[lanes] = region.load(addresses[lanes], width, count)
        return out

    def store(self, addresses: Lanes, values: NDArray[Any], width: int, count: int) -> None:
        for region, lanes in self.split(addresses):
            if lanes is None:
                region.store(addresses, values, width, count)
            else:
                region.store(addresses[lanes], values[lanes], width, count)

    def read(self, address: int, size: int) -> Bytes:
        region = self.region(address)
        if region.stamps is not None:
            region.stamps.read(np.arange(address - region.base, address - region.base + size), 1)
        return region.slice(address, size, "read")

    def write(self, address: int, data: Bytes) -> None:
        self.region(address).slice(address, len(data), "write")[:] = data


class SharedMemory(Region):
    """A CTA's shared memory: which bytes are initialised, in which order its words were accessed, and which the async
    proxy may not see yet: `dirty[word]` is when a generic write became visible to it, 0 always, `_NEVER` not yet.
    """

    def __init__(
        self, rank: int, size: int, name: str, agents: Agents, tolerated: frozenset[str] = frozenset()
    ) -> None:
        total = -(-(RESERVED_SHARED + size) // 64) * 64
        data = np.full(total, 0xCD, np.uint8)
        super().__init__(data, rank << RANK_SHIFT, RESERVED_SHARED + size, name)
        self.initialised = np.full(total, "uninitialised" in tolerated, np.uint8)
        self._cp_async_is_fenced = "unfenced-cp-async" in tolerated
        self._known: dict[int, NDArray[Any]] = {}
        self._ones: dict[int, Any] = {}  # an element of initialised bytes
        self.dirty = np.zeros(total // 4, np.uint32)
        self.track_proxy = not agents.simple
        self.history = History(total // 2, agents)
        self.pending_writes: list[tuple[int, int, Lanes]] = []

    def known(self, size: int) -> NDArray[Any]:
        """Which bytes are initialised, as elements of a size."""
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = _elements(self.initialised, size)
        return found

    def load_by(self, warp: int, clock: Clock, may_race: bool, addresses: Lanes, width: int, count: int) -> Lanes:
        """A generic-proxy read by a warp under its clock."""
        size = width * count
        index = self.index(addresses, size)
        if index is None:
            raise self.refuse(addresses, size, "read")
        initialised = self.known(size)[index].tobytes()
        if 0 in initialised:
            lane = initialised.index(0) // size
            raise MemoryFault(f"read of uninitialised shared memory at {int(addresses[lane]):#x} in {self.name}")
        if not may_race:
            writer = self.history.read(_cells(index, size), warp, int(clock[warp]), clock, size == 1)
            if writer is not None:
                raise self._race(addresses, f"read by warp {warp}", writer, "wrote")
        return self.gather(index, width, count)

    def _race(self, addresses: Lanes, access: str, other: str, what: str) -> RaceError:
        first, last = int(addresses.min()), int(addresses.max())
        return RaceError(
            f"{access} of shared memory within {first:#x}..{last:#x} in {self.name}, which {other} {what} with no "
            "barrier or wait between"
        )

    def store_by(
        self, warp: int, clock: Clock, may_race: bool, addresses: Lanes, values: NDArray[Any], width: int, count: int,
        by_copy: bool = False,
    ) -> None:  # fmt: skip
        """A generic-proxy write by a warp under its clock; `by_copy`: of its cp.async."""
        size = width * count
        index = self.index(addresses, size)
        if index is None:
            raise self.refuse(addresses, size, "write")
        if min(index.tolist()) * size < RESERVED_SHARED:
            raise MemoryFault(f"write below shared memory at {int(addresses.min()):#x} in {self.name}")
        cells = _cells(index, size)
        conflict = None if may_race else self.history.conflict(cells, clock)
        if conflict is not None and not np.array_equal(self.gather(index, width, count), values):
            raise self._race(addresses, f"write by warp {warp}", *conflict)
        self.scatter(index, values, size)
        known = self.known(size)
        if size not in self._ones:
            self._ones[size] = np.frombuffer(b"\1" * size, known.dtype)[0]
        known[index] = self._ones[size]
        self.history.write(cells, warp, int(clock[warp]), size == 1)
        if self.track_proxy and not (by_copy and self._cp_async_is_fenced):
            words = cells >> 1
            self.dirty[words] = _NEVER
            self.pending_writes.append((warp, int(clock[warp]), words))

    def fence(self, clock: Clock, now: int) -> None:
        """`fence.proxy.async` by a thread that has seen each warp up to `clock[warp]`."""
        rest = []
        for record in self.pending_writes:
            warp, epoch, words = record
            if epoch <= clock[warp]:
                self.dirty[words] = now
            else:
                rest.append(record)
        self.pending_writes = rest

    def read_async(self, offsets: NDArray[np.int64], count: int, access: Access, action: str) -> Bytes:
        """`count` bytes from each offset for the async proxy: initialised, and visible when it was issued."""
        if int(offsets.max()) + count > self.size or int(offsets.min()) < 0:
            raise MemoryFault(f"{action} reads outside {self.name}, at offset {int(offsets.max()):#x}")
        width, index = wide_rows(offsets, count)
        self._check_fenced(index, width, access, f"{action} reads")
        unknown = self.known(width)[index] != 0x0101010101010101 >> (64 - 8 * width)
        if 1 in unknown.tobytes():
            bad = int(index.flat[int(np.argmax(unknown))]) * width
            raise MemoryFault(f"{action} reads uninitialised shared memory at {bad + self.base:#x} in {self.name}")
        writer = self.history.read(_cells(index.reshape(-1), width), access.agent, access.epoch, access.clock)
        if writer is not None:
            raise self._race(offsets + self.base, f"{action}: read", writer, "writes")
        return self.view(width)[index].view(np.uint8)

    def _check_fenced(self, index: Lanes, width: int, access: Access, action: str) -> None:
        late = (self.dirty.reshape(-1, 2)[index] if width == 8 else self.dirty[index >> 2]) > access.issued
        if 1 in late.tobytes():
            where = int(np.argmax(late)) // (late.size // index.size)
            raise ProxyFenceError(
                f"{action} shared memory at {int(index.flat[where]) * width + self.base:#x} in {self.name}, written "
                "through the generic proxy without a later fence.proxy.async before the operation was issued"
            )

    def write_async(self, offsets: NDArray[np.int64], data: Bytes, access: Access, action: str) -> None:
        """Rows of bytes at offsets, written through the async proxy."""
        if int(offsets.max()) + data.shape[1] > self.size:
            raise MemoryFault(f"{action} writes beyond {self.name}, at offset {int(offsets.max()):#x}")
        width, index = wide_rows(offsets, data.shape[1])
        self._check_fenced(index, width, access, f"{action} writes")
        cells = _cells(index.reshape(-1), width)
        conflict = self.history.conflict(cells, access.clock)
        if conflict is not None:
            raise self._race(offsets + self.base, f"{action}: write", *conflict)
        self.view(width)[index] = np.ascontiguousarray(data).view(_UNSIGNED[width])
        self.known(width)[index] = 0x0101010101010101 >> (64 - 8 * width)
        self.dirty[cells >> 1] = 0
        self.history.write(cells, access.agent, access.epoch)

    def mark_written(self, offset: int, size: int) -> None:
        self.initialised[offset : offset + size] = 1
        self.dirty[offset >> 2 : (offset + size + 3) >> 2] = 0
        self.history.forget(slice(offset >> 1, (offset + size + 1) >> 1))


class LocalMemory:
    """Per-thread memory of one warp: `data[lane, byte]`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = np.full((32, max(-(-size // 64) * 64, 64)), 0xCD, np.uint8)
        self._flat = Region(self.data.reshape(-1), 0, self.data.size, "local memory")

    def _addresses(self, addresses: Lanes, lanes: Lanes, size: int) -> Lanes:
        addresses = addresses.astype(np.uint64)
        if int(addresses.max()) + size > self.size:
            raise MemoryFault(f"local address {int(addresses.max()):#x} is outside the thread's {self.size} bytes")
        return np.asarray(addresses + lanes * np.uint64(self.data.shape[1]))

    def load(self, addresses: Lanes, lanes: Lanes, width: int, count: int) -> NDArray[Any]:
        return self._flat.load(self._addresses(addresses, lanes, width * count), width, count)

    def store(self, addresses: Lanes, lanes: Lanes, values: NDArray[Any], width: int, count: int) -> None:
        self._flat.store(self._addresses(addresses, lanes, width * count), values, width, count)
