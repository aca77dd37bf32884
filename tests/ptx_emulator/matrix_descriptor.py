"""Shared-memory matrix descriptors of tcgen05 and wgmma: where each 16-byte chunk of an operand lies.

PTX ISA "Shared memory descriptor" and "Canonical layouts"; CuTe's `UMMA::SmemDescriptor` and `GMMA::GmmaDescriptor` say
the same in code. An operand is a grid of 16-byte chunks, `rows` outside by `chunks` along its contiguous dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import tensor_map
from ptx_emulator.errors import EmulatorError, UnknownInstructionError
from ptx_emulator.tensor_map import Swizzle

Bytes = NDArray[np.uint8]
Read = Callable[[NDArray[np.uint64], int], Bytes]
"""read(addresses[n], count) -> uint8 [n, count]; addresses within the CTA's shared window."""

_TCGEN05_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}
_WGMMA_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
# 16-byte chunks in a row of the swizzle atom.
_ATOM_CHUNKS = {Swizzle.NONE: 1, Swizzle.B32: 2, Swizzle.B64: 4, Swizzle.B128: 8, Swizzle.B128_ATOM_32B: 8}


@dataclass(frozen=True)
class MatrixDescriptor:
    """Decoded descriptor; addresses and offsets in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle

    @classmethod
    def tcgen05(cls, value: int) -> "MatrixDescriptor":
        """From the 64 bits that tcgen05.mma and tcgen05.cp take; refuses what is reserved or not modelled."""
        mode = value >> 61 & 7
        if mode not in _TCGEN05_SWIZZLES:
            raise EmulatorError(f"matrix descriptor {value:#018x}: swizzle mode {mode} is reserved")
        if value >> 46 & 7 != 1:
            raise EmulatorError(f"matrix descriptor {value:#018x}: bits 46-48 must be 0b001")
        if value >> 49 & 0xFFF:
            raise UnknownInstructionError(
                f"matrix descriptor {value:#018x}: base offset and absolute leading addresses are not modelled"
            )
        return cls._of(value, _TCGEN05_SWIZZLES[mode])

    @classmethod
    def wgmma(cls, value: int) -> "MatrixDescriptor":
        """From the 64 bits that wgmma.mma_async takes."""
        if value >> 46 & 7 or value >> 52 & 0x3FF:
            raise EmulatorError(f"matrix descriptor {value:#018x}: bits 46-48 and 52-61 must be zero")
        if value >> 49 & 7:
            raise UnknownInstructionError(f"matrix descriptor {value:#018x}: base offset is not modelled")
        return cls._of(value, _WGMMA_SWIZZLES[value >> 62 & 3])

    @classmethod
    def _of(cls, value: int, swizzle: Swizzle) -> "MatrixDescriptor":
        def field(position: int) -> int:
            return (value >> position & 0x3FFF) << 4

        if value >> 14 & 3 or value >> 30 & 3:
            raise EmulatorError(f"matrix descriptor {value:#018x}: bits 14-15 and 30-31 must be zero")
        # With a base offset of zero the swizzle's pattern starts at multiples of 1024, 512 or 256 bytes (PTX ISA,
        # "Shared memory descriptor", starting address of the repeating pattern): it is the absolute address that is
        # swizzled. The operand may start anywhere in the pattern, at 16 bytes: CUTLASS's do, at odd multiples of 512.
        return cls(field(0), field(16), field(32), swizzle)

    def k_major(self, rows: int, chunks: int) -> NDArray[np.uint64]:
        """Addresses [rows, chunks] of an operand whose K is contiguous; 8 rows are `stride` from the next 8."""
        return _k_major(self, rows, chunks)

    def _k_major(self, rows: int, chunks: int) -> NDArray[np.uint64]:
        row, chunk = np.mgrid[:rows, :chunks]
        if self.swizzle is Swizzle.NONE:
            offset = row % 8 * 16 + chunk * self.leading
        elif self.swizzle is Swizzle.B128_ATOM_32B:
            raise EmulatorError("the 128-byte swizzle with 32-byte atoms serves MN-major operands only")
        else:
            offset = row % 8 * 16 * _ATOM_CHUNKS[self.swizzle] + chunk * 16
        return self._swizzled(offset + row // 8 * self.stride)

    def mn_major(self, depth: int, chunks: int) -> NDArray[np.uint64]:
        """Addresses [depth, chunks] of an operand whose M or N dimension is contiguous; `depth` counts K."""
        return _mn_major(self, depth, chunks)

    def _mn_major(self, depth: int, chunks: int) -> NDArray[np.uint64]:
        k, chunk = np.mgrid[:depth, :chunks]
        if self.swizzle is Swizzle.NONE:
            offset = k % 8 * 16 + k // 8 * self.leading + chunk * self.stride
        else:
            group = 4 if self.swizzle is Swizzle.B128_ATOM_32B else 8
            atom = _ATOM_CHUNKS[self.swizzle]
            offset = chunk % atom * 16 + chunk // atom * self.leading + k % group * 16 * atom + k // group * self.stride
        return self._swizzled(offset)

    def _swizzled(self, offset: NDArray[np.int64]) -> NDArray[np.uint64]:
        return tensor_map.swizzled((self.start + offset).astype(np.uint64), self.swizzle)


# A loop's descriptors come again, in every warp and CTA.
_k_major = lru_cache(4096)(MatrixDescriptor._k_major)
_mn_major = lru_cache(4096)(MatrixDescriptor._mn_major)


def read_chunks(addresses: NDArray[np.uint64], read: Read) -> Bytes:
    """uint8 [rows, chunks, 16] at the addresses [rows, chunks]."""
    return read(addresses.reshape(-1), 16).reshape(*addresses.shape, 16)
