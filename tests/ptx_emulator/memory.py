"""Memory spaces: what the checker knows about every byte lives beside the byte."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import MemoryFault, ProxyFenceError, RaceError

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
_bitand = np.bitwise_and.reduce


def _rows(data: Bytes, width: int, count: int) -> NDArray[Any]:
    whole = len(data) // (width * count) * (width * count)
    view: NDArray[Any] = data[:whole].view(_UNSIGNED[width])
    return view if count == 1 else view.reshape(-1, count)


def _words(offsets: Lanes, size: int) -> Lanes:
    """The 4-byte words that accesses of `size` bytes touch."""
    words = offsets >> offsets.dtype.type(2)
    if size > 4:
        words = (words[:, None] + np.arange(size // 4, dtype=words.dtype)).reshape(-1)
    return np.asarray(words)


class Region:
    """Contiguous bytes addressed from `base`."""

    def __init__(self, data: Bytes, base: int, size: int, name: str, read_only: bool = False) -> None:
        self.data = data
        self.base = base
        self.size = size
        self.name = name
        self.read_only = read_only
        self.touched: NDArray[np.bool_] | None = None  # which bytes were read or written, where someone asked
        self._views: dict[tuple[int, int], NDArray[Any]] = {}

    def view(self, width: int, count: int) -> NDArray[Any]:
        key = (width, count)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = _rows(self.data, width, count)
        return found

    def offsets(self, addresses: Lanes, bytes_per_lane: int, action: str) -> Lanes:
        """Offsets of checked addresses; raises MemoryFault naming the first bad one."""
        offsets = addresses - addresses.dtype.type(self.base)
        if max(offsets.tolist()) + bytes_per_lane > self.size or int(_bitor(offsets)) & (bytes_per_lane - 1):
            for address, offset in zip(addresses.tolist(), offsets.tolist(), strict=True):
                if offset + bytes_per_lane > self.size:
                    raise MemoryFault(
                        f"{action} of {bytes_per_lane} bytes at {address:#x} is outside {self.name} "
                        f"[{self.base:#x}, {self.base + self.size:#x})"
                    )
                if address % bytes_per_lane:
                    raise MemoryFault(f"misaligned {action} of {bytes_per_lane} bytes at {address:#x} in {self.name}")
        return np.asarray(offsets)

    def load(self, addresses: Lanes, width: int, count: int) -> NDArray[Any]:
        offsets = self.offsets(addresses, width * count, "read")
        self.touch(offsets, width * count)
        loaded: NDArray[Any] = self.view(width, count)[offsets // offsets.dtype.type(width * count)]
        return loaded

    def store(self, addresses: Lanes, values: NDArray[Any], width: int, count: int) -> None:
        if self.read_only:
            raise MemoryFault(f"write to read-only {self.name} at {int(addresses[0]):#x}")
        offsets = self.offsets(addresses, width * count, "write")
        self.touch(offsets, width * count)
        self.view(width, count)[offsets // offsets.dtype.type(width * count)] = values

    def slice(self, address: int, size: int, action: str) -> Bytes:
        offset = address - self.base
        if offset < 0 or offset + size > self.size:
            raise MemoryFault(
                f"{action} of {size} bytes at {address:#x} is outside {self.name} "
                f"[{self.base:#x}, {self.base + self.size:#x})"
            )
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
        self._bases: list[int] = []
        self._regions: list[Region] = []

    def allocate(self, size: int, name: str = "allocation", align: int = 256, fill: int | None = 0xFF) -> Region:
        """A new region; unwritten bytes are 0xFF (NaN in every float format) unless `fill` says otherwise."""
        padded = -(-max(size, 1) // 64) * 64
        buffer = np.full(padded + 2 * _GUARD + align, 0 if fill is None else fill, np.uint8)
        start = -(-(buffer.ctypes.data + _GUARD) // align) * align - buffer.ctypes.data
        return self.adopt(buffer[start : start + padded], size, name)

    def adopt(self, data: Bytes, size: int, name: str, read_only: bool = False) -> Region:
        """Make a host buffer visible to kernels at its own address."""
        region = Region(data, data.ctypes.data, size, f"{name} ({size} bytes)", read_only)
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
        inside = (addresses - addresses.dtype.type(region.base)) < region.size
        if inside.all():
            return [(region, None)]
        parts: list[tuple[Region, NDArray[np.bool_] | None]] = [(region, inside)]
        rest = ~inside
        while rest.any():
            region = self.region(int(addresses[rest][0]))
            inside = rest & ((addresses - addresses.dtype.type(region.base)) < region.size)
            parts.append((region, inside))
            rest &= ~inside
        return parts

    def load(self, addresses: Lanes, width: int, count: int) -> NDArray[Any]:
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
        return self.region(address).slice(address, size, "read")

    def write(self, address: int, data: Bytes) -> None:
        self.region(address).slice(address, len(data), "write")[:] = data


class SharedMemory(Region):
    """A CTA's shared memory: which bytes are initialised, and which words the async proxy may not see yet.

    `dirty[word]` is when a generic write became visible to the async proxy: 0 is always, `_NEVER` is not yet.
    `writer[word]` wrote last through the generic proxy, at `epoch[word]` of its vector clock; epoch 0 is known to all.
    """

    def __init__(self, rank: int, size: int, name: str, track_proxy: bool) -> None:
        total = -(-(RESERVED_SHARED + size) // 64) * 64
        data = np.full(total, 0xCD, np.uint8)
        super().__init__(data, rank << RANK_SHIFT, RESERVED_SHARED + size, name)
        self.initialised = np.zeros(total, np.uint8)
        self._initialised_views: dict[tuple[int, int], NDArray[Any]] = {}
        self.dirty = np.zeros(total // 4, np.uint32)
        self.track_proxy = track_proxy
        self.writer = np.zeros(total // 4, np.uint16)
        self.epoch = np.zeros(total // 4, np.int64)
        self.pending_writes: list[tuple[int, int, Lanes]] = []

    def _initialised(self, width: int, count: int) -> NDArray[Any]:
        key = (width, count)
        found = self._initialised_views.get(key)
        if found is None:
            found = self._initialised_views[key] = _rows(self.initialised, width, count)
        return found

    def load(self, addresses: Lanes, width: int, count: int) -> NDArray[Any]:
        offsets = self.offsets(addresses, width * count, "read")
        index = offsets // offsets.dtype.type(width * count)
        known = self._initialised(width, count)[index]
        if int(_bitand(known.reshape(-1))) != 0x0101010101010101 >> (64 - 8 * width):
            flat = known.reshape(len(addresses), -1).view(np.uint8).all(axis=1)
            lane = int(np.argmin(flat))
            raise MemoryFault(f"read of uninitialised shared memory at {int(addresses[lane]):#x} in {self.name}")
        loaded: NDArray[Any] = self.view(width, count)[index]
        return loaded

    def load_by(self, clock: NDArray[np.int64], addresses: Lanes, width: int, count: int) -> NDArray[Any]:
        """A generic-proxy read by a warp that has seen every warp up to `clock[warp]`."""
        loaded = self.load(addresses, width, count)
        words = _words(addresses - addresses.dtype.type(self.base), width * count)
        unseen = self.epoch[words] > clock[self.writer[words]]
        if unseen.any():
            word = int(words[unseen][0])
            raise RaceError(
                f"read of shared memory at {word * 4 + self.base:#x} in {self.name}, which warp {self.writer[word]} "
                "wrote with no barrier between"
            )
        return loaded

    def store_by(self, warp: int, epoch: int, addresses: Lanes, values: NDArray[Any], width: int, count: int) -> None:
        """A generic-proxy write by a warp at its vector-clock epoch."""
        offsets = self.offsets(addresses, width * count, "write")
        if min(offsets.tolist()) < RESERVED_SHARED:
            raise MemoryFault(f"write below shared memory at {int(addresses.min()):#x} in {self.name}")
        index = offsets // offsets.dtype.type(width * count)
        self.view(width, count)[index] = values
        self._initialised(width, count)[index] = 0x0101010101010101 >> (64 - 8 * width)
        words = _words(offsets, width * count)
        self.writer[words] = warp
        self.epoch[words] = epoch
        if self.track_proxy:
            self.dirty[words] = _NEVER
            self.pending_writes.append((warp, epoch, words))

    def fence(self, clock: NDArray[np.int64], now: int) -> None:
        """`fence.proxy.async` by a thread that has seen each warp up to `clock[warp]`."""
        rest = []
        for record in self.pending_writes:
            warp, epoch, words = record
            if epoch <= clock[warp]:
                self.dirty[words] = now
            else:
                rest.append(record)
        self.pending_writes = rest

    def gather_async(self, offsets: NDArray[np.int64], issued: int, action: str) -> Bytes:
        """Bytes at offsets of any shape for the async proxy: initialised, and visible when it was issued."""
        if offsets.size and (int(offsets.max()) >= self.size or int(offsets.min()) < 0):
            raise MemoryFault(f"{action} reads outside {self.name}, at offset {int(offsets.max()):#x}")
        self.check_async(offsets >> 2, issued, action)
        known = self.initialised[offsets]
        if not known.all():
            bad = int(offsets[known == 0].flat[0])
            raise MemoryFault(f"{action} reads uninitialised shared memory at {bad + self.base:#x} in {self.name}")
        gathered: Bytes = self.data[offsets]
        return gathered

    def check_async(self, words: NDArray[Any], issued: int, action: str) -> None:
        late = self.dirty[words] > issued
        if late.any():
            word = int(words[late].flat[0])
            raise ProxyFenceError(
                f"{action} reads shared memory at {word * 4 + self.base:#x} in {self.name}, written through the "
                "generic proxy without a later fence.proxy.async before the operation was issued"
            )

    def mark_written(self, offset: int, size: int) -> None:
        self.initialised[offset : offset + size] = 1
        self.dirty[offset >> 2 : (offset + size + 3) >> 2] = 0
        self.epoch[offset >> 2 : (offset + size + 3) >> 2] = 0


class LocalMemory:
    """Per-thread memory of one warp: `data[lane, byte]`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = np.zeros((32, max(-(-size // 64) * 64, 64)), np.uint8)
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
