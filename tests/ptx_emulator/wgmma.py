"""`wgmma.mma_async` of SM90: each warp of a warpgroup computes 16 rows of a 64 x N tile.

B, and A unless it is in registers, are read through matrix descriptors; register fragments are those of `mma.sync`
m16n8, repeated along N. Arithmetic as in mma.py.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import formats, mma
from ptx_emulator.errors import EmulatorError, UnknownInstructionError
from ptx_emulator.matrix_descriptor import MatrixDescriptor, Read, read_chunks
from ptx_emulator.tcgen05 import element_values

_BYTES_OF_K = 32  # per instruction, whatever the type


@dataclass(frozen=True)
class Wgmma:
    """One `wgmma.mma_async` variant."""

    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    satfinite: bool = False

    @property
    def bits(self) -> int:
        """Bits of an operand element in registers and shared memory."""
        return 8 * _BYTES_OF_K // self.k

    def execute(
        self,
        warp: int,
        a: NDArray[np.uint32] | int,
        b_descriptor: int,
        d: NDArray[np.uint32],
        read_shared: Read,
        *,
        accumulate: bool,
        a_scale: int = 1,
        b_scale: int = 1,
        a_mn_major: bool = False,
        b_mn_major: bool = False,
    ) -> NDArray[np.uint32]:
        """The new D fragment [registers, 32] of a warp.

        warp: its index in the CTA; a: register fragment [4, 32], or the matrix descriptor of all 64 rows. The scales
        are the immediates 1 or -1; the MN-major flags are the transposition immediates of the 16-bit types.
        """
        if isinstance(a, int):
            left = self._operand(a, 16 * (warp % 4), 16, self.a_type, a_mn_major, read_shared)
        else:
            left = mma.a_values(a, self.k, self.bits, self.a_type)
        right = self._operand(b_descriptor, 0, self.n, self.b_type, b_mn_major, read_shared)
        with np.errstate(invalid="ignore", over="ignore"):
            total = (a_scale * left) @ (b_scale * right).T
            if accumulate:
                total += mma.unpack_accumulator(d, self.d_type, self.n)
            return mma.pack_accumulator(total, self.d_type, self.satfinite)

    def _operand(
        self, value: int, first: int, rows: int, type_name: str, mn_major: bool, read: Read
    ) -> NDArray[np.float64]:
        """`rows` of the matrix from a multiple of eight on."""
        matrix = MatrixDescriptor.wgmma(value)
        if not mn_major:
            return element_values(read_chunks(matrix.k_major(first + rows, 2)[first:], read), type_name, self.bits)
        if self.bits != 16:
            raise EmulatorError(f"wgmma with .{type_name} operands takes K-major matrices only")
        chunks = read_chunks(matrix.mn_major(self.k, -(-(first + rows) // 8))[:, first // 8 :], read)
        return element_values(chunks, type_name, self.bits).T[:rows]


def decode(modifiers: tuple[str, ...]) -> Wgmma:
    """The variant named by the dot-separated words of the opcode; raises UnknownInstructionError."""
    text = ".".join(modifiers)
    if "sp" in modifiers:
        raise UnknownInstructionError(f"{text}: sparse wgmma is not modelled")
    shape = next((m for w in modifiers if (m := re.fullmatch(r"m64n(\d+)k(\d+)", w))), None)
    types = [w for w in modifiers if w in formats.BY_NAME or w in mma.INTEGER_BITS or w in ("f32", "s32")]
    if shape is None or len(types) != 3:
        raise UnknownInstructionError(f"{text}: a shape m64nNkK and three types are expected")
    return Wgmma(int(shape[1]), int(shape[2]), types[0], types[1], types[2], "satfinite" in modifiers)
