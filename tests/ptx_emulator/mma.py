"""Warp-level `mma.sync`: fragment layouts and arithmetic.

Fragments follow PTX ISA "Matrix Fragments for mma.m16n8k*": every supported shape is one rule, written in terms of how
many elements a 32-bit register holds. Products are exact; a floating-point result is the float64 sum of the
products and the accumulator, rounded once to the accumulator's type (the hardware truncates in between, in an order
that the ISA leaves open, so results agree within accumulation error). Integers wrap, or saturate with `.satfinite`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import formats
from ptx_emulator.errors import UnknownInstructionError

Registers = NDArray[np.uint32]  # [registers, 32 lanes]

LANES = np.arange(32)
GROUP, MEMBER = LANES >> 2, LANES & 3
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
        left = _gather(a, _a_index(self.m, self.k, bits), bits)
        right = _gather(b, _b_index(self.k, self.n, bits), bits)
        if self.a_type in INTEGER_BITS:
            return self._integer(left, right, c)
        a_values = self._decode(left, self.a_type).astype(np.float64)
        b_values = self._decode(right, self.b_type).astype(np.float64)
        if self.scale_vectors:
            assert scale_a is not None
            assert scale_b is not None
            a_values *= self._scales(scale_a, scale_a_id, self.m)
            b_values *= self._scales(scale_b, scale_b_id, self.n).T
        with np.errstate(invalid="ignore", over="ignore"):
            total = a_values @ b_values + _unpack_accumulator(c, self.c_type, self.m, self.n)
            return _pack_accumulator(total, self.d_type)

    def _decode(self, codes: NDArray[np.uint32], type_name: str) -> NDArray[np.float32]:
        if self.kind in ("f8f6f4", "mxf8f6f4") and type_name == "e2m1":
            codes = codes >> np.uint32(2)  # FP4 sits in the middle of its byte
        return formats.float_format(type_name).decode(codes)

    def _scales(self, registers: NDArray[np.uint32], selector: tuple[int, int], rows: int) -> NDArray[np.float64]:
        """[rows, K] scale of each element: A reads a pair of lanes per quad (rows g, g + 8), B one lane per quad."""
        byte_id, thread_id = selector
        if byte_id not in BYTE_IDS[self.scale_vectors]:
            raise UnknownInstructionError(f"mma scale_vec::{self.scale_vectors}X cannot start at byte {byte_id}")
        if thread_id not in ((0, 1) if rows == 16 else (0, 1, 2, 3)):
            raise UnknownInstructionError(f"mma scale thread-id {thread_id} is out of range for {rows} rows")
        row = np.arange(rows)
        lane = 4 * (row % 8) + (2 * thread_id + row // 8 if rows == 16 else thread_id)
        shifts = 8 * (byte_id + np.arange(self.scale_vectors, dtype=np.uint32))
        codes = registers[lane][:, None] >> shifts.astype(np.uint32) & np.uint32(0xFF)
        scales = formats.float_format(str(self.scale_type)).decode(codes).astype(np.float64)
        return np.repeat(scales, self.k // self.scale_vectors, axis=1)

    def _integer(self, left: NDArray[np.uint32], right: NDArray[np.uint32], c: Registers) -> Registers:
        def value(codes: NDArray[np.uint32], type_name: str) -> NDArray[np.int64]:
            wide = codes.astype(np.int64)
            bits = INTEGER_BITS[type_name]
            return np.where(wide >> (bits - 1), wide - (1 << bits), wide) if type_name[0] == "s" else wide

        total = value(left, self.a_type) @ value(right, self.b_type) + c.view(np.int32)[_C_REGISTER, _C_LANE]
        if self.satfinite:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return _scatter_accumulator((total & 0xFFFFFFFF).astype(np.uint32))


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


@lru_cache
def _a_index(m: int, k: int, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """(register, lane, shift) of element [row, column]: 8 rows by 4 lanes, the upper rows in the odd registers."""
    row, column = np.mgrid[:m, :k]
    per_register = 32 // bits
    half, inside = np.divmod(column, 4 * per_register)
    return (
        row // 8 + (m // 8) * half,
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


def _gather(
    registers: Registers, index: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]], bits: int
) -> NDArray[np.uint32]:
    register, lane, shift = index
    if register.max() + 1 != len(registers):
        raise UnknownInstructionError(
            f"mma fragment of {register.max() + 1} registers expected, {len(registers)} given"
        )
    codes = registers[register, lane] >> shift
    return codes if bits == 32 else codes & np.uint32((1 << bits) - 1)


# 32-bit accumulators: lane holds columns 2 * member, + 1 of rows group (registers 0, 1) and group + 8 (2, 3).
_ROW, _COLUMN = np.mgrid[:16, :8]
_C_REGISTER, _C_LANE = 2 * (_ROW // 8) + _COLUMN % 2, 4 * (_ROW % 8) + _COLUMN // 2


def _unpack_accumulator(c: Registers, type_name: str, m: int, n: int) -> NDArray[np.float64]:
    if type_name == "f32":
        return c.view(np.float32)[_C_REGISTER, _C_LANE].astype(np.float64)
    if type_name == "f16":
        codes = c[_ROW // 8, _C_LANE] >> (16 * (_COLUMN % 2)).astype(np.uint32)
        return formats.F16.decode(codes & np.uint32(0xFFFF)).astype(np.float64)
    raise UnknownInstructionError(f"mma.sync with .{type_name} accumulators is not modelled")


def _scatter_accumulator(values: NDArray[np.uint32]) -> Registers:
    d = np.empty((4, 32), np.uint32)
    d[_C_REGISTER, _C_LANE] = values
    return d


def _pack_accumulator(total: NDArray[np.float64], type_name: str) -> Registers:
    if type_name == "f32":
        return _scatter_accumulator(total.astype(np.float32).view(np.uint32))
    wide = _scatter_accumulator(formats.F16.encode(total))
    return wide[0::2] | wide[1::2] << np.uint32(16)
