"""Warp-level `mma.sync`: fragment layouts and arithmetic.

Fragments follow PTX ISA "Matrix Fragments for mma.m16n8k*": every supported shape is one rule, written in terms of how
many elements a 32-bit register holds. Products are exact; a floating-point result is the float64 sum of the
products and the accumulator, rounded once to the accumulator's type (the hardware truncates in between, in an order
that the ISA leaves open, so results agree within accumulation error). Integers wrap, or saturate with `.satfinite`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import formats
from ptx_emulator.errors import UnknownInstructionError

Registers = NDArray[np.uint32]  # [registers, 32 lanes]

LANES = np.arange(32)
GROUP, MEMBER = LANES >> 2, LANES & 3
# The two halves of every byte, low and high, as one 16-bit value.
_NIBBLES = np.array([[byte & 15, byte >> 4] for byte in range(256)], np.uint8).view(np.uint16)[:, 0]
INTEGER_BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4}
# K elements that one scale factor covers is K / factor count; which byte offsets and threads may hold them: PTX ISA,
# "mma.sync.block_scale", selectors.
BYTE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


@dataclass(frozen=True)
class MmaSync:
    """One `mma.sync` variant, decoded from its dot-separated modifiers."""

    m: int
    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    c_type: str
    kind: str | None = None
    scale_vectors: int = 0
    scale_type: str | None = None
    satfinite: bool = False

    @property
    def container_bits(self) -> int:
        """Bits that an A or B element occupies in a register: FP4 and FP6 sit in bytes outside the mxf4 kinds."""
        if self.kind in ("f8f6f4", "mxf8f6f4"):
            return 8
        return {"tf32": 32}.get(self.a_type) or INTEGER_BITS.get(self.a_type) or formats.float_format(self.a_type).bits

    def execute(
        self,
        a: Registers,
        b: Registers,
        c: Registers,
        scale_a: NDArray[np.uint32] | None = None,
        scale_a_id: tuple[int, int] = (0, 0),
        scale_b: NDArray[np.uint32] | None = None,
        scale_b_id: tuple[int, int] = (0, 0),
    ) -> Registers:
        """D fragment [registers, 32] of A, B, C fragments; a scale id is (byte-id, thread-id)."""
        bits = self.container_bits
        a_values = self._decode(a, self.m, self.a_type).take(_a_places(self.k, bits))
        b_values = self._decode(b, self.n, self.b_type).take(_b_places(self.k, self.n, bits))
        if self.scale_vectors:
            assert scale_a is not None
            assert scale_b is not None
            a_values *= self._scales(scale_a, scale_a_id, self.m)
            b_values *= self._scales(scale_b, scale_b_id, self.n).T
        with np.errstate(invalid="ignore", over="ignore"):
            total = a_values @ b_values + unpack_accumulator(c, self.c_type, self.n)
            return pack_accumulator(total, self.d_type, self.satfinite)

    def _decode(self, registers: Registers, rows: int, type_name: str) -> NDArray[np.float64]:
        codes = containers(registers, self.container_bits)
        if len(codes) != rows * self.k:
            raise UnknownInstructionError(f"mma fragment of {len(registers)} registers does not fit {self}")
        if self.kind in ("f8f6f4", "mxf8f6f4") and type_name == "e2m1":
            codes = codes >> 2  # FP4 sits in the middle of its byte
        return operand_values(codes, type_name)

    def _scales(self, registers: NDArray[np.uint32], selector: tuple[int, int], rows: int) -> NDArray[np.float64]:
        """[rows, K] scale of each element."""
        places = _scale_places(rows, self.k, self.scale_vectors, *selector)
        return operand_values(containers(registers, 8), str(self.scale_type)).take(places)


def decode(modifiers: tuple[str, ...]) -> MmaSync:
    """The variant named by a PTX opcode split at dots, "mma" first or not.

    Raises UnknownInstructionError for what the emulator does not compute (sparse, FP64, m8n8 shapes).
    """
    words = [w for w in modifiers if w not in ("mma", "sync", "aligned")]
    text = "mma.sync." + ".".join(words)
    kind: str | None = None
    scale_vectors = 0
    shape: tuple[int, int, int] | None = None
    types: list[str] = []
    layouts: list[str] = []
    satfinite = False
    for word in words:
        if match := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", word):
            shape = (int(match[1]), int(match[2]), int(match[3]))
        elif word.startswith("kind::"):
            kind = word[6:]
        elif match := re.fullmatch(r"scale_vec::(\d)X", word):
            scale_vectors = int(match[1])
        elif word in ("row", "col"):
            layouts.append(word)
        elif word == "satfinite":
            satfinite = True
        elif word in formats.BY_NAME or word in INTEGER_BITS or word in ("f32", "s32"):
            types.append(word)
        elif word != "block_scale":
            raise UnknownInstructionError(f"{text}: modifier .{word} is not modelled")
    if "block_scale" in words and not scale_vectors:
        scale_vectors = {"mxf8f6f4": 1, "mxf4": 2}.get(str(kind), 0)  # the only choice there is, so it may be left out
    if shape is None or shape[:2] != (16, 8) or layouts != ["row", "col"] or len(types) != 4 + bool(scale_vectors):
        raise UnknownInstructionError(f"{text}: only dense m16n8 shapes, A by row and B by column, are modelled")
    scale_type = types[4] if scale_vectors else None
    return MmaSync(*shape, types[0], types[1], types[2], types[3], kind, scale_vectors, scale_type, satfinite)


def containers(registers: Registers, bits: int) -> NDArray[Any]:
    """Element codes of `bits` each, register after register, lane after lane, lowest bits first."""
    flat = np.ascontiguousarray(registers).reshape(-1)
    if bits == 4:
        return _NIBBLES.take(flat.view(np.uint8)).view(np.uint8)
    return flat.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])


def a_values(registers: Registers, k: int, bits: int, type_name: str) -> NDArray[np.float64]:
    """[16, k] elements of an A fragment whose elements take `bits` of a register."""
    return operand_values(containers(registers, bits), type_name).take(_a_places(k, bits))


@lru_cache
def _a_index(k: int, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """(register, lane, shift) of element [row, column]: 8 rows by 4 lanes, the upper rows in the odd registers."""
    row, column = np.mgrid[:16, :k]
    per_register = 32 // bits
    half, inside = np.divmod(column, 4 * per_register)
    return (
        row // 8 + 2 * half,
        (row % 8) * 4 + inside // per_register,
        (inside % per_register * bits).astype(np.uint32),
    )


@lru_cache
def _b_index(k: int, n: int, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """(register, lane, shift) of element [k, column]: a lane's registers go down K."""
    row, column = np.mgrid[:k, :n]
    per_register = 32 // bits
    register, inside = np.divmod(row, 4 * per_register)
    return register, column * 4 + inside // per_register, (inside % per_register * bits).astype(np.uint32)


@lru_cache
def _a_places(k: int, bits: int) -> NDArray[np.int64]:
    return _places(*_a_index(k, bits), bits)


@lru_cache
def _b_places(k: int, n: int, bits: int) -> NDArray[np.int64]:
    return _places(*_b_index(k, n, bits), bits)


def _places(register: Any, lane: Any, shift: Any, bits: int) -> NDArray[np.int64]:
    """Where elements are among their fragment's containers."""
    places: NDArray[np.int64] = ((32 * register + lane) * 32 + shift.astype(np.int64)) // bits
    return places


@lru_cache
def _scale_places(rows: int, k: int, vectors: int, byte_id: int, thread_id: int) -> NDArray[np.int64]:
    """[rows, k] bytes of the scales: A reads a pair of lanes per quad (rows g, g + 8), B one lane per quad."""
    if byte_id not in BYTE_IDS[vectors]:
        raise UnknownInstructionError(f"mma scale_vec::{vectors}X cannot start at byte {byte_id}")
    if thread_id not in ((0, 1) if rows == 16 else (0, 1, 2, 3)):
        raise UnknownInstructionError(f"mma scale thread-id {thread_id} is out of range for {rows} rows")
    row = np.arange(rows)
    lane = 4 * (row % 8) + (2 * thread_id + row // 8 if rows == 16 else thread_id)
    return np.repeat(4 * lane[:, None] + byte_id + np.arange(vectors), k // vectors, axis=1)


@lru_cache
def _accumulator_places(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where element [row, column] of a 16 x n accumulator is among its 32-bit registers, 4 per 8 columns; and back."""
    row, column = np.mgrid[:16, :n]
    places = 32 * (4 * (column // 8) + 2 * (row // 8) + column % 2) + 4 * (row % 8) + column % 8 // 2
    return places, np.argsort(places, axis=None).reshape(n // 2, 32)


def unpack_accumulator(c: Registers, type_name: str, n: int) -> NDArray[np.float64]:
    """[16, n] values of a fragment; 16-bit accumulators hold two neighbouring columns in a register."""
    flat = np.ascontiguousarray(c).reshape(-1, 32)
    if type_name == "f16":
        halves = np.stack([flat & np.uint32(0xFFFF), flat >> np.uint32(16)], axis=1)
        values: NDArray[Any] = formats.F16.decode(halves.reshape(-1))
    elif type_name in ("f32", "s32"):
        values = flat.reshape(-1).view({"f32": np.float32, "s32": np.int32}[type_name])
    else:
        raise UnknownInstructionError(f"mma with .{type_name} accumulators is not modelled")
    return values.take(_accumulator_places(n)[0]).astype(np.float64)


def pack_accumulator(total: NDArray[np.float64], type_name: str, satfinite: bool) -> Registers:
    """The fragment of [16, n] results, rounded once; integers wrap or saturate."""
    if type_name == "f32":
        codes = total.astype(np.float32).view(np.uint32)
    elif type_name == "s32":
        codes = (integers(total, satfinite) & 0xFFFFFFFF).astype(np.uint32)
    else:
        codes = formats.F16.encode(total)
    wide = codes.take(_accumulator_places(total.shape[1])[1])
    return wide if type_name != "f16" else wide[0::2] | wide[1::2] << np.uint32(16)


def integers(total: NDArray[np.float64], satfinite: bool) -> NDArray[np.int64]:
    """Exact integer sums (below 2**53), clamped to 32 bits if asked."""
    return np.clip(total, -(2.0**31), 2.0**31 - 1).astype(np.int64) if satfinite else total.astype(np.int64)


def operand_values(codes: NDArray[Any], type_name: str) -> NDArray[np.float64]:
    """Element codes to values; 8-bit and 4-bit integers included."""
    if type_name not in INTEGER_BITS:
        return formats.float_format(type_name).exact(codes)
    bits = INTEGER_BITS[type_name]
    values = codes.astype(np.float64)
    return np.where(codes >> (bits - 1), values - (1 << bits), values) if type_name[0] == "s" else values
