"""Tiled tensor maps and the box copies of `cp.async.bulk.tensor` between global and shared memory.

A map holds what `cuTensorMapEncodeTiled` was given, under the same rules (CUDA driver API, "Tensor Map Object
Management"); the 128 bytes it travels in are this emulator's own. Swizzles act on shared-memory address bits.
Not modelled, and refused: interleaved layouts, im2col, 64-byte swizzle atoms, swizzled rows shorter than the swizzle.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ptx_emulator.errors import EmulatorError, MemoryFault, UnknownInstructionError

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.uint64]
Read = Callable[[Addresses, int], Bytes]
"""read(addresses[n], count) -> uint8 [n, count]."""
Write = Callable[[Addresses, Bytes], None]
"""write(addresses[n], data uint8 [n, count])."""

CHUNK = 16  # bytes that every swizzle moves as a whole, and the granularity of shared-memory rows


class ElementType(IntEnum):
    """CUtensorMapDataType."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    U4_ALIGN8 = 13
    U4_ALIGN16 = 14
    U6_ALIGN16 = 15


class Swizzle(IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


_E = ElementType
_DTYPES: dict[ElementType, DTypeLike] = {
    _E.UINT8: np.uint8,
    _E.UINT16: np.uint16,
    _E.UINT32: np.uint32,
    _E.INT32: np.int32,
    _E.UINT64: np.uint64,
    _E.INT64: np.int64,
    _E.FLOAT16: np.float16,
    _E.FLOAT32: np.float32,
    _E.FLOAT64: np.float64,
    _E.BFLOAT16: ml_dtypes.bfloat16,
    _E.FLOAT32_FTZ: np.float32,
    _E.TFLOAT32: np.float32,
    _E.TFLOAT32_FTZ: np.float32,
}
# Bits of an element in global memory; and, for the types that are padded there, in shared memory.
_BITS = {
    **{t: 8 * np.dtype(d).itemsize for t, d in _DTYPES.items()},
    _E.U4_ALIGN8: 4,
    _E.U4_ALIGN16: 4,
    _E.U6_ALIGN16: 6,
}
_PADDED = (_E.U4_ALIGN16, _E.U6_ALIGN16)
# What fills out-of-bounds elements when NaN is asked for (the "special NaN" of the driver API: all ones but the sign).
_NAN_FILL = {
    _E.FLOAT16: 0x7FFF,
    _E.BFLOAT16: 0x7FFF,
    _E.FLOAT32: 0x7FFFFFFF,
    _E.FLOAT32_FTZ: 0x7FFFFFFF,
    _E.TFLOAT32: 0x7FFFFFFF,
    _E.TFLOAT32_FTZ: 0x7FFFFFFF,
    _E.FLOAT64: 0x7FFFFFFFFFFFFFFF,
}
# (bits swapped, lowest target bit, distance to the source bits): CuTe's Swizzle<B, M, S>.
_SWIZZLES = {
    Swizzle.NONE: (0, 4, 3),
    Swizzle.B32: (1, 4, 3),
    Swizzle.B64: (2, 4, 3),
    Swizzle.B128: (3, 4, 3),
    Swizzle.B128_ATOM_32B: (2, 5, 2),
}
_SPAN = {Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128, Swizzle.B128_ATOM_32B: 128}

_MAGIC = b"TMAP"
_PACKED = struct.Struct("<4sBBBBBBxxQ5Q4Q5H5B")


def swizzled(addresses: Addresses, mode: Swizzle) -> Addresses:
    """The shared-memory address at which an unswizzled address lands."""
    if mode not in _SWIZZLES:
        raise UnknownInstructionError(f"swizzle {mode.name} is not modelled")
    bits, base, distance = _SWIZZLES[mode]
    mask = np.uint64((1 << bits) - 1 << base)
    return addresses ^ (addresses >> np.uint64(distance) & mask)


@dataclass(frozen=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` takes: dimension 0 is contiguous; `strides` are bytes of dimensions 1 and up."""

    element_type: ElementType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    nan_fill: bool = False

    def __post_init__(self) -> None:
        rank, kind = len(self.dims), self.element_type
        padded = kind in _PADDED

        def need(condition: bool, rule: str) -> None:
            if not condition:
                raise EmulatorError(f"cuTensorMapEncodeTiled: {rule}; given {self}")

        need(1 <= rank <= 5, "the rank is 1 to 5")
        need(len(self.strides) == rank - 1, "there is a stride for every dimension but the first")
        need(len(self.box) == len(self.element_strides) == rank, "box and element strides have the rank of the tensor")
        need(self.interleave == 0, "interleaved layouts are not modelled")
        need(self.address % (32 if padded else 16) == 0, "the address is a multiple of 16 bytes (32 for padded types)")
        need(all(0 < d <= 1 << 32 for d in self.dims), "dimensions lie in [1, 2^32]")
        need(
            all(s % (32 if padded else 16) == 0 and 0 <= s < 1 << 40 for s in self.strides),
            "strides are multiples of 16 bytes (32 for padded types) below 2^40",
        )
        need(all(0 < b <= 256 for b in self.box), "box dimensions lie in [1, 256]")
        need(all(1 <= e <= 8 for e in self.element_strides), "element strides lie in [1, 8]")
        need(self.box[0] * _BITS[kind] % (8 * CHUNK) == 0, "the box's rows are multiples of 16 bytes")
        need(not padded or (self.dims[0] % 128 == 0 and self.box[0] == 128), "padded types have rows of 128 elements")
        need(kind is not _E.U4_ALIGN8 or self.dims[0] % 2 == 0, "4-bit rows hold an even number of elements")
        need(not self.nan_fill or kind in _NAN_FILL, "only floating-point types are filled with NaN")
        span = _SPAN.get(self.swizzle)
        if span is not None:
            need(self.row_bytes <= span, f"the box's rows fit the swizzle's {span} bytes")

    @property
    def row_bytes(self) -> int:
        """Bytes of a box row in shared memory."""
        return self.box[0] if self.element_type in _PADDED else self.box[0] * _BITS[self.element_type] // 8

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements copied along each dimension; the traversal stride of dimension 0 is ignored."""
        outer = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-b // e) for b, e in outer))

    @property
    def transaction_bytes(self) -> int:
        """Bytes a full load counts on its mbarrier; padding does not count, out-of-bounds fill does."""
        return int(np.prod(self.counts)) * _BITS[self.element_type] // 8

    def to_bytes(self) -> bytes:
        """The 128 bytes of the opaque CUtensorMap."""

        def padded_to(values: tuple[int, ...], count: int) -> tuple[int, ...]:
            return values + (0,) * (count - len(values))

        return _PACKED.pack(
            _MAGIC,
            len(self.dims),
            self.element_type,
            self.interleave,
            self.swizzle,
            self.l2_promotion,
            self.nan_fill,
            self.address,
            *padded_to(self.dims, 5),
            *padded_to(self.strides, 4),
            *padded_to(self.box, 5),
            *padded_to(self.element_strides, 5),
        ).ljust(128, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes | Bytes) -> "TensorMap":
        """Inverse of `to_bytes`; raises EmulatorError where the memory holds no tensor map."""
        magic, rank, kind, interleave, swizzle, l2, fill, address, *rest = _PACKED.unpack(bytes(data)[: _PACKED.size])
        if magic != _MAGIC:
            raise EmulatorError("the tensor map operand does not point to an encoded tensor map")
        return cls(
            ElementType(kind),
            address,
            tuple(rest[:rank]),
            tuple(rest[5 : 5 + rank - 1]),
            tuple(rest[9 : 9 + rank]),
            tuple(rest[14 : 14 + rank]),
            interleave,
            Swizzle(swizzle),
            l2,
            bool(fill),
        )

    def _rows(self, coordinates: Sequence[int], gather: Sequence[int] | None) -> tuple[Addresses, NDArray[np.bool_]]:
        """Global address of each box row's start (possibly outside the tensor) and whether the row is inside it."""
        rank = len(self.dims)
        if len(coordinates) != rank:
            raise EmulatorError(f"tensor copy with {len(coordinates)} coordinates through a map of rank {rank}")
        positions = [
            np.array(gather)
            if gather is not None and i == 1
            else coordinates[i] + np.arange(n) * self.element_strides[i]
            for i, n in enumerate(self.counts)
            if i > 0
        ]
        offset = np.zeros(1, np.int64)
        inside = np.ones(1, bool)
        for i, position in enumerate(positions, start=1):
            valid = (position >= 0) & (position < self.dims[i])
            offset = (position[:, None] * self.strides[i - 1] + offset).reshape(-1)
            inside = (valid[:, None] & inside).reshape(-1)
        return (self.address + offset).astype(np.uint64), inside

    def _columns(self, start: int) -> tuple[int, int, int]:
        """(first, last) byte of a packed row that lies inside the tensor, and the row's global byte offset."""
        bits = _BITS[self.element_type]
        if start * bits % 8:
            raise EmulatorError(f"tensor copy starts at element {start}, inside a byte of {bits}-bit elements")
        first = min(max(0, -start), self.box[0])
        last = max(first, min(self.box[0], self.dims[0] - start))
        if first * bits % 8 or last * bits % 8:
            raise EmulatorError("the tensor's edge cuts a byte of narrow elements")
        return first * bits // 8, last * bits // 8, start * bits // 8

    def _shared(self, address: int, rows: int) -> Addresses:
        """[rows, chunks] swizzled shared-memory addresses of the box's 16-byte chunks."""
        if address % (128 if self.swizzle or self.element_type in _PADDED else 16):
            raise MemoryFault(f"tensor copy: shared address {address:#x} is not aligned to 128 bytes")
        span = _SPAN.get(self.swizzle)
        if span is not None and self.row_bytes != span:
            raise UnknownInstructionError(f"swizzled rows of {self.row_bytes} bytes, not {span}, are not modelled")
        chunks = address + np.arange(rows * self.row_bytes // CHUNK, dtype=np.uint64) * np.uint64(CHUNK)
        return swizzled(chunks.astype(np.uint64), self.swizzle)


# Position in the packed words, by the instruction's field qualifier; arrays take an ordinal.
_FIELDS = {
    "rank": 1,
    "elemtype": 2,
    "interleave_layout": 3,
    "swizzle_mode": 4,
    "fill_mode": 6,
    "global_address": 7,
    "global_dim": 8,
    "global_stride": 13,
    "box_dim": 17,
    "element_stride": 22,
}
# The instruction's own numbering of element types, PTX ISA "tensormap.replace".
_REPLACED_TYPES = (
    *(_E.UINT8, _E.UINT16, _E.UINT32, _E.INT32, _E.UINT64, _E.INT64, _E.FLOAT16, _E.FLOAT32, _E.FLOAT32_FTZ),
    *(_E.FLOAT64, _E.BFLOAT16, _E.TFLOAT32, _E.TFLOAT32_FTZ, _E.U4_ALIGN8, _E.U4_ALIGN16, _E.U6_ALIGN16),
)


def replace(data: bytes | Bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """`tensormap.replace` on a map's 128 bytes. What a sequence of replacements leaves is checked when it is used.

    `rank` is given minus one, as the instruction takes it; strides are in bytes.
    """
    words = list(_PACKED.unpack(bytes(data)[: _PACKED.size]))
    if words[0] != _MAGIC:
        raise EmulatorError("tensormap.replace: the operand does not point to an encoded tensor map")
    if field not in _FIELDS:
        raise UnknownInstructionError(f"tensormap.replace.{field} is not modelled")
    if field == "elemtype":
        value = _REPLACED_TYPES[value]
    words[_FIELDS[field] + ordinal] = value + (field == "rank")
    return _PACKED.pack(*words).ljust(128, b"\0")


def load(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    read_global: Read,
    gather: Sequence[int] | None = None,
) -> tuple[Addresses, Bytes]:
    """A box from global memory: (shared addresses [n], data uint8 [n, 16]), out-of-bounds elements filled.

    Coordinates are signed, dimension 0 first. `gather` is the four rows of `.tile::gather4`, in place of coordinate 1.
    """
    starts, inside = tensor_map._rows(coordinates, gather)
    first, last, offset = tensor_map._columns(coordinates[0])
    kind = tensor_map.element_type
    row_bytes = tensor_map.box[0] * _BITS[kind] // 8
    data = np.zeros((len(starts), row_bytes), np.uint8)
    if tensor_map.nan_fill:
        size = _BITS[kind] // 8
        data[:] = np.tile(np.frombuffer(_NAN_FILL[kind].to_bytes(size, "little"), np.uint8), row_bytes // size)
    if last > first and inside.any():
        sources = (starts[inside].astype(np.int64) + offset + first).astype(np.uint64)
        data[inside, first:last] = read_global(sources, last - first)
    if kind in _PADDED:
        chunk = 2 * _BITS[kind]  # bytes of 16 packed elements
        padded = np.zeros((len(starts), row_bytes // chunk, CHUNK), np.uint8)
        padded[:, :, :chunk] = data.reshape(len(starts), -1, chunk)
        data = padded.reshape(len(starts), -1)
    return tensor_map._shared(shared_address, len(starts)), data.reshape(-1, CHUNK)


def store(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    read_shared: Read,
    write_global: Write,
    read_global: Read | None = None,
    reduction: str | None = None,
    scatter: Sequence[int] | None = None,
) -> int:
    """A box to global memory, elements outside the tensor dropped; with `reduction` combined with what is there.

    Returns the bytes written. `scatter` is the four rows of `.tile::scatter4`.
    """
    kind = tensor_map.element_type
    if kind is _E.U4_ALIGN16:
        raise EmulatorError("a 16U4_ALIGN16B tensor map serves loads only")
    starts, inside = tensor_map._rows(coordinates, scatter)
    first, last, offset = tensor_map._columns(coordinates[0])
    data = read_shared(tensor_map._shared(shared_address, len(starts)), CHUNK)
    if kind is _E.U6_ALIGN16:
        data = np.ascontiguousarray(data[:, :12])
    data = data.reshape(len(starts), -1)[inside, first:last]
    if data.size == 0:
        return 0
    targets = (starts[inside].astype(np.int64) + offset + first).astype(np.uint64)
    if reduction is not None:
        if read_global is None or kind not in _DTYPES:
            raise UnknownInstructionError(f"tensor reduction .{reduction} of {kind.name} is not modelled")
        data = reduce(reduction, _DTYPES[kind], read_global(targets, last - first), data)
    write_global(targets, data)
    return data.size


def reduce(operation: str, dtype: DTypeLike, old: Bytes, new: Bytes) -> Bytes:
    """Bulk reduction of byte arrays holding `dtype` elements: add, min, max, inc, dec, and, or, xor; same shape."""
    dtype = np.dtype(dtype)
    shape = old.shape
    left = np.ascontiguousarray(old).view(dtype)
    right = np.ascontiguousarray(new).view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if operation == "add":
            result = left + right
        elif operation == "min":
            result = np.minimum(left, right)
        elif operation == "max":
            result = np.maximum(left, right)
        elif operation == "inc":
            result = np.where(left >= right, 0, left + 1)
        elif operation == "dec":
            result = np.where((left == 0) | (left > right), right, left - 1)
        elif operation in ("and", "or", "xor"):
            result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](left, right)
        else:
            raise UnknownInstructionError(f"bulk reduction .{operation} is not modelled")
    return np.ascontiguousarray(result.astype(dtype)).view(np.uint8).reshape(shape)
