"""tcgen05: instruction descriptors, matrix multiply-accumulate of one or two CTAs, and shared-to-tensor-memory copies.

Sources: PTX ISA "tcgen05 instruction descriptor", "data path layout organization", "scale factor layout"; CuTe's
`tmem_frg`, `tmem_sf_frg` and UTCCP traits. Products are exact; a floating-point result is the float64 sum of products
and accumulator, rounded once. Every quarter (32 lanes) of tensor memory computes from its own lanes, as the hardware's
data paths do, so a scale factor that was not replicated to all quarters is seen as missing.
Not modelled, and refused: sparse and .ws variants, K = 96, narrow elements of A in tensor memory with kind::f8f6f4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import formats, ldmatrix
from ptx_emulator.errors import EmulatorError, UnknownInstructionError
from ptx_emulator.matrix_descriptor import Bytes, MatrixDescriptor, Read, read_chunks
from ptx_emulator.mma import integers, operand_values
from ptx_emulator.tensor_memory import TensorMemory, TensorPort

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "i8": {0: "u8", 1: "s8"},
    "f8f6f4": _F8F6F4,
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_ACCUMULATORS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "i8": {2: "s32"}, "f8f6f4": {0: "f16", 1: "f32"}}
# Bits that an operand element occupies in memory: FP4 and FP6 share the 16-byte groups of FP8 outside the mxf4 kinds.
_CONTAINER_BITS = {"f16": 16, "tf32": 32, "i8": 8, "f8f6f4": 8, "mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
_EXPANSIONS = {"e2m1": "b4x16_p64", "e2m3": "b6x16_p32", "e3m2": "b6x16_p32"}
# Bits of the instruction descriptor that are zero for dense operations (PTX ISA, "Instruction descriptor").
_RESERVED = {"plain": 0xE080_0043, "mx": 0x8700_004B, "mxf4": 0x0701_904B}
_SCALE_MODIFIERS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4}


@dataclass(frozen=True)
class Cta:
    """What an MMA or copy touches of one CTA: its SM's tensor memory and a reader of its shared memory."""

    memory: TensorMemory | TensorPort
    read_shared: Read


@dataclass(frozen=True)
class InstructionDescriptor:
    """The decoded 32 bits. `a_mn_major`: M is contiguous (the "transpose" bit); scale ids are byte offsets."""

    kind: str
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_negate: bool
    b_negate: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool = False
    scale_type: str | None = None
    a_scale_id: int = 0
    b_scale_id: int = 0

    @classmethod
    def decode(cls, value: int, kind: str) -> "InstructionDescriptor":
        """Raises EmulatorError for reserved encodings, UnknownInstructionError for sparse or K = 96 ones."""

        def bits(low: int, count: int) -> int:
            return value >> low & ((1 << count) - 1)

        def pick(table: dict[int, str], code: int, what: str) -> str:
            if code not in table:
                raise EmulatorError(f"instruction descriptor {value:#010x}: {what} {code} is reserved for kind::{kind}")
            return table[code]

        if kind not in _OPERAND_TYPES:
            raise UnknownInstructionError(f"tcgen05.mma.kind::{kind} is not modelled")
        scaled = kind.startswith("mx")
        if bits(2, 1):
            raise UnknownInstructionError("sparse tcgen05.mma is not modelled")
        if scaled and bits(31, 1):
            raise UnknownInstructionError("tcgen05.mma with K = 96 is not modelled")
        reserved = _RESERVED["mxf4" if kind.startswith("mxf4") else "mx" if scaled else "plain"]
        if value & reserved:
            raise EmulatorError(f"instruction descriptor {value:#010x}: reserved bits {value & reserved:#010x} are set")
        types = _OPERAND_TYPES[kind]
        return cls(
            kind,
            m=bits(24, 5) << 4,
            n=bits(17, 6) << 3,
            a_type=pick(types, bits(7, 3), "A type"),
            b_type=pick(types, bits(10, 2 if kind.startswith("mxf4") else 3), "B type"),
            d_type="f32" if scaled else pick(_ACCUMULATORS[kind], bits(4, 2), "D type"),
            a_negate=bool(bits(13, 1)),
            b_negate=bool(bits(14, 1)),
            a_mn_major=bool(bits(15, 1)),
            b_mn_major=bool(bits(16, 1)),
            saturate=bool(bits(3, 1)),
            scale_type=("ue8m0" if bits(23, 1) else "ue4m3") if scaled else None,
            a_scale_id=bits(29, 2) if scaled else 0,
            b_scale_id=bits(4, 2) if scaled else 0,
        )

    @property
    def container_bits(self) -> int:
        return _CONTAINER_BITS[self.kind]

    @property
    def k(self) -> int:
        """Elements of K per instruction: always 32 bytes of containers."""
        return 256 // self.container_bits

    def check(self, ctas: int) -> None:
        """The shapes that the ISA allows for one or two CTAs."""
        rows = {1: (64, 128), 2: (128, 256)}[ctas] if not self.scale_type else {1: (128,), 2: (128, 256)}[ctas]
        if self.m not in rows or not 8 * ctas <= self.n <= 256 or self.n % (8 * ctas):
            raise EmulatorError(f"tcgen05.mma.cta_group::{ctas}.kind::{self.kind} has no shape M={self.m}, N={self.n}")
        for mn_major, type_name in ((self.a_mn_major, self.a_type), (self.b_mn_major, self.b_type)):
            if mn_major and type_name in ("e2m1", "e2m3", "e3m2"):
                raise EmulatorError(f"tcgen05.mma: operands of .{type_name} elements are K-major")


def scale_vectors(kind: str, modifiers: Sequence[str]) -> int:
    """Scale factors per row and instruction, from the modifiers of a block-scaled tcgen05.mma."""
    if kind == "mxf8f6f4":
        return 1
    for modifier in modifiers:
        if modifier in _SCALE_MODIFIERS:
            return _SCALE_MODIFIERS[modifier]
    if kind == "mxf4":
        return 2
    raise EmulatorError(f"tcgen05.mma.kind::{kind} names no .scale_vec")


@dataclass(frozen=True)
class _Part:
    """What one quarter of one CTA's tensor memory computes: `rows` of the CTA's A, a range of N, at `lanes`."""

    cta: int
    lanes: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: slice  # of N
    half: int  # which half of N, where the quarters share the work

    @property
    def quarter(self) -> int:
        return int(self.lanes[0]) // 32


def _parts(m: int, n: int, ctas: int, first_lane: int) -> list[_Part]:
    """How M x N spreads over the data paths ("data path layout organization")."""
    lane = np.arange(32)
    parts = []
    for cta in range(ctas):
        rows_per_cta = m // ctas
        for quarter in range(4):
            lanes = 32 * quarter + lane
            if rows_per_cta == 128:
                parts.append(_Part(cta, lanes, lanes, slice(0, n), 0))
            elif ctas == 1:  # M = 64: 16 rows per quarter
                lanes = 32 * quarter + first_lane + lane[:16]
                parts.append(_Part(cta, lanes, 16 * quarter + lane[:16], slice(0, n), 0))
            else:  # M = 128 on two CTAs: two quarters for the rows, two for the columns
                half = quarter // 2
                columns = slice(half * n // 2, (half + 1) * n // 2)
                parts.append(_Part(cta, lanes, 32 * (quarter % 2) + lane, columns, half))
    return parts


def mma(
    descriptor: InstructionDescriptor,
    ctas: Sequence[Cta],
    d_address: int,
    a: int,
    b_descriptor: int,
    *,
    accumulate: bool,
    a_in_tensor_memory: bool = False,
    scale_vectors: int = 0,
    a_scale_address: int = 0,
    b_scale_address: int = 0,
    scale_input_d: int = 0,
    disabled_lanes: Sequence[int] = (),
) -> None:
    """D = A B^T (+ D * 2^-scale_input_d), in place in the tensor memory of one or two CTAs, the even-ranked CTA first.

    a: matrix descriptor, or tensor-memory address with `a_in_tensor_memory`. scale_vectors: factors per row, see the
    function of that name. disabled_lanes: one 32-bit mask per 32 lanes (four per CTA), set bits keep their D.
    """
    descriptor.check(len(ctas))
    m, n = descriptor.m, descriptor.n
    b_values = np.concatenate(
        [_from_shared(cta.read_shared, b_descriptor, n // len(ctas), descriptor, False) for cta in ctas]
    )
    a_values = [
        None if a_in_tensor_memory else _from_shared(cta.read_shared, a, m // len(ctas), descriptor, True)
        for cta in ctas
    ]
    first_lane, d_column = d_address >> 16, d_address & 0xFFFF
    if first_lane not in ((0, 16) if m // len(ctas) == 64 and len(ctas) == 1 else (0,)):
        raise EmulatorError(f"tcgen05.mma: D cannot start at lane {first_lane} for M={m}")
    for part in _parts(m, n, len(ctas), first_lane):
        memory = ctas[part.cta].memory
        shared_a = a_values[part.cta]
        left = _a_from_tensor_memory(memory, a, part, descriptor) if shared_a is None else shared_a[part.rows]
        right = b_values[part.columns]
        if scale_vectors:
            # A quarter that computes half of N holds the factors of that half alone.
            for_a = memory, a_scale_address, part, part.rows, descriptor.a_scale_id
            for_b = memory, b_scale_address, part, np.arange(len(right)), descriptor.b_scale_id
            left = left * _scales(*for_a, scale_vectors, descriptor, "A")
            right = right * _scales(*for_b, scale_vectors, descriptor, "B")
        columns = d_column + np.arange(len(right))
        keep = np.zeros(len(part.lanes), bool)
        if disabled_lanes:
            mask = disabled_lanes[4 * part.cta + part.quarter]
            keep = (mask >> (part.lanes % 32) & 1).astype(bool)
        if keep.all():
            continue
        lanes = part.lanes[~keep, None]
        with np.errstate(invalid="ignore", over="ignore"):
            total = left[~keep] @ right.T
            if accumulate:
                old = memory.read(lanes, columns, "tcgen05.mma reading D")
                total += _accumulator_values(old, descriptor.d_type) * 2.0**-scale_input_d
            result = _accumulator_cells(total, descriptor)
        memory.write(lanes, columns, result, "tcgen05.mma writing D")


def _from_shared(
    read: Read, value: int, rows: int, descriptor: InstructionDescriptor, is_a: bool
) -> NDArray[np.float64]:
    """Operand rows [rows, K] from shared memory."""
    matrix = MatrixDescriptor.tcgen05(value)
    mn_major = descriptor.a_mn_major if is_a else descriptor.b_mn_major
    type_name = descriptor.a_type if is_a else descriptor.b_type
    negate = descriptor.a_negate if is_a else descriptor.b_negate
    if mn_major:
        per_chunk = 128 // descriptor.container_bits
        chunks = read_chunks(matrix.mn_major(descriptor.k, -(-rows // per_chunk)), read)
        values = element_values(chunks, type_name, descriptor.container_bits).T[:rows]
    else:
        values = element_values(read_chunks(matrix.k_major(rows, 2), read), type_name, descriptor.container_bits)
    return -values if negate else values


def element_values(chunks: Bytes, type_name: str, bits: int) -> NDArray[np.float64]:
    """Elements of 16-byte chunks [rows, chunks, 16] as float64 [rows, elements]."""
    rows = chunks.shape[0]
    if bits == 8 and type_name in _EXPANSIONS:  # 16 narrow elements, then padding
        expansion = _EXPANSIONS[type_name]
        codes: NDArray[Any] = ldmatrix.expand(np.ascontiguousarray(chunks).reshape(-1, 16), expansion).reshape(rows, -1)
    elif bits == 4:
        flat = np.ascontiguousarray(chunks).reshape(rows, -1)
        codes = np.stack([flat & 15, flat >> 4], axis=2).reshape(rows, -1)
    else:
        codes = np.ascontiguousarray(chunks).reshape(rows, -1).view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    return operand_values(codes, type_name)


def _a_from_tensor_memory(
    memory: TensorMemory | TensorPort, address: int, part: _Part, descriptor: InstructionDescriptor
) -> NDArray[np.float64]:
    """A rows of a part, packed along the columns of the part's own lanes."""
    fmt_bits = 8 if descriptor.kind == "i8" else formats.float_format(descriptor.a_type).bits
    if fmt_bits < descriptor.container_bits:
        raise UnknownInstructionError(f"A of .{descriptor.a_type} elements in tensor memory is not modelled")
    if descriptor.a_mn_major:
        raise EmulatorError("tcgen05.mma: A in tensor memory is K-major")
    column = address & 0xFFFF
    cells = memory.read(part.lanes[:, None], column + np.arange(8), "tcgen05.mma reading A")
    values = element_values(
        cells.view(np.uint8).reshape(len(cells), 2, 16), descriptor.a_type, descriptor.container_bits
    )
    return -values if descriptor.a_negate else values


def _scales(
    memory: TensorMemory | TensorPort,
    address: int,
    part: _Part,
    rows: NDArray[np.int64],
    first_byte: int,
    count: int,
    descriptor: InstructionDescriptor,
    operand: str,
) -> NDArray[np.float64]:
    """[rows, K] factors from a 32-bit cell per row: row r lies in lane r % 32 of each quarter, column r / 32."""
    where = 32 * part.quarter + rows % 32, (address & 0xFFFF) + rows // 32
    cells = memory.read(*where, f"tcgen05.mma reading {operand}'s scale factors")
    if first_byte % count:
        raise EmulatorError(f"scale factor id {first_byte} does not fit {count} factors")
    codes = cells[:, None] >> (8 * (first_byte + np.arange(count))).astype(np.uint32) & np.uint32(0xFF)
    values = formats.float_format(str(descriptor.scale_type)).decode(codes).astype(np.float64)
    return np.repeat(values, descriptor.k // count, axis=1)


def _accumulator_values(cells: NDArray[np.uint32], type_name: str) -> NDArray[np.float64]:
    if type_name == "f32":
        return cells.view(np.float32).astype(np.float64)
    if type_name == "s32":
        return cells.view(np.int32).astype(np.float64)
    return formats.F16.decode(cells & np.uint32(0xFFFF)).astype(np.float64)


def _accumulator_cells(total: NDArray[np.float64], descriptor: InstructionDescriptor) -> NDArray[np.uint32]:
    if descriptor.d_type == "f32":
        return total.astype(np.float32).view(np.uint32)
    if descriptor.d_type == "s32":
        return (integers(total, descriptor.saturate) & 0xFFFFFFFF).astype(np.uint32)
    return formats.F16.encode(total)  # one 16-bit result per column


# Shape and multicast -> source rows, 16-byte chunks, and for each replica the lane of a row.
_Lanes = NDArray[np.int64]
_COPIES: dict[str, tuple[int, int, Callable[[_Lanes], list[_Lanes]]]] = {
    "128x256b": (128, 2, lambda row: [row]),
    "128x128b": (128, 1, lambda row: [row]),
    "64x128b.warpx2::02_13": (64, 1, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda row: [row % 32 + 64 * (row // 32) + 32 * i for i in range(2)]),
    "32x128b.warpx4": (32, 1, lambda row: [row + 32 * i for i in range(4)]),
    "4x256b": (4, 2, lambda row: [32 * row]),
}


def copy(shape: str, ctas: Sequence[Cta], address: int, descriptor: int) -> None:
    """`tcgen05.cp` from each CTA's shared memory to its own tensor memory; `shape` includes the multicast qualifier."""
    if shape not in _COPIES:
        raise UnknownInstructionError(f"tcgen05.cp.{shape} is not modelled; known: {', '.join(_COPIES)}")
    rows, chunks, lanes_of = _COPIES[shape]
    source = MatrixDescriptor.tcgen05(descriptor).k_major(rows, chunks)
    columns = (address & 0xFFFF) + np.arange(4 * chunks)
    for cta in ctas:
        cells = np.ascontiguousarray(read_chunks(source, cta.read_shared)).reshape(rows, -1).view(np.uint32)
        for lanes in lanes_of(np.arange(rows)):
            cta.memory.write((address >> 16) + lanes[:, None], columns, cells, f"tcgen05.cp.{shape}")
