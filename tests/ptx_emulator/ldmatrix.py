"""Warp-collective `ldmatrix` and `stmatrix`: which byte of which row each lane's registers hold.

A matrix is a set of rows of 16 bytes, each at an address that one lane supplies; matrix i takes its addresses from
lanes [i * rows, (i + 1) * rows). Layouts: PTX ISA `ldmatrix`, `stmatrix`; the 8-bit forms are checked against CuTe.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptx_emulator.errors import UnknownInstructionError

Bytes = NDArray[np.uint8]
Read = Callable[[NDArray[np.uint64], int], Bytes]
"""read(addresses[n], count) -> uint8 [n, count]."""
Write = Callable[[NDArray[np.uint64], Bytes], None]
"""write(addresses[n], data uint8 [n, count])."""

# Shape -> (rows of 16 bytes per matrix, registers per matrix).
LOAD_SHAPES = {"m8n8": (8, 1), "m8n16": (8, 1), "m16n16": (16, 2)}


@lru_cache
def _layout(shape: str, transposed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, byte) of [register, lane, byte in register] within one matrix."""
    register, lane, byte = np.mgrid[:2, :32, :4]
    group, member = lane >> 2, lane & 3
    if shape in ("m8n8", "m8n16") and not transposed:
        row, column = group, 4 * member + byte
    elif shape == "m8n8":  # 16-bit elements: a lane holds rows 2 * member, + 1 of column `group`
        row, column = 2 * member + byte // 2, 2 * group + byte % 2
    elif shape == "m16n16" and transposed:
        row, column = 4 * member + byte, group + 8 * register
    elif shape == "m16n8" and transposed:  # stmatrix.b8: memory holds the 8 columns of 16 bytes
        row, column = 2 * member + byte % 2, group + 8 * (byte // 2)
    else:
        raise UnknownInstructionError(
            f"{shape}{'.trans' if transposed else ''} is no matrix layout of ldmatrix/stmatrix"
        )
    count = 2 if shape == "m16n16" else 1
    return row[:count], column[:count]


def load(
    addresses: NDArray[np.uint64],
    read: Read,
    shape: str = "m8n8",
    count: int = 1,
    transposed: bool = False,
    source_format: str | None = None,
) -> NDArray[np.uint32]:
    """`ldmatrix`: registers [count * per_matrix, 32] from the lanes' row addresses [32].

    source_format "b4x16_p64" or "b6x16_p32" expands 16 narrow elements of a 16-byte row into bytes, zero-extended.
    """
    if shape not in LOAD_SHAPES:
        raise UnknownInstructionError(f"ldmatrix.{shape} is not modelled")
    rows, per_matrix = LOAD_SHAPES[shape]
    data = read(addresses[: rows * count], 16)
    if source_format is not None:
        data = expand(data, source_format)
    row, column = _layout(shape, transposed)
    picked = data.reshape(count, rows, 16)[:, row, column]
    return np.ascontiguousarray(picked).view(np.uint32).reshape(count * per_matrix, 32)


def store(
    addresses: NDArray[np.uint64],
    registers: NDArray[np.uint32],
    write: Write,
    shape: str = "m8n8",
    transposed: bool = False,
) -> None:
    """`stmatrix`: one matrix of 8 rows of 16 bytes per register [count, 32]."""
    count = len(registers)
    row, column = _layout(shape, transposed)
    data = np.empty((count, 8, 16), np.uint8)
    data[:, row[0], column[0]] = np.ascontiguousarray(registers).view(np.uint8).reshape(count, 32, 4)
    write(addresses[: 8 * count], data.reshape(8 * count, 16))


def expand(rows: Bytes, source_format: str) -> Bytes:
    """Rows of 16 packed narrow elements, padding above them, to 16 bytes each [n, 16]."""
    bits = {"b4x16_p64": 4, "b6x16_p32": 6}.get(source_format)
    if bits is None:
        raise UnknownInstructionError(f"source format .{source_format} is not modelled; known: b4x16_p64, b6x16_p32")
    stream = np.unpackbits(rows[:, : 2 * bits], axis=1, bitorder="little").reshape(len(rows), 16, bits)
    return np.packbits(stream, axis=2, bitorder="little").reshape(len(rows), 16)
