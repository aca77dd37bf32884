"""Which bits of a program's registers may be one, whatever it computes on.

A fixed point over all instructions that write a register; where nothing is known, all bits of it may be. Addresses of
shared memory are below 256 KiB, but for a CTA's rank in its cluster from bit 24 on, and multiples of their alignment.
"""

from __future__ import annotations

from .ir import TYPE_BITS, Immediate, Instruction, Operand, Register, Special, Symbol, registers_of
from .program import Program

_SHARED = (1 << 18) - 1 | 0xFF << 24
_UNSIGNED = [f"{kind}{bits}" for kind in "bu" for bits in (8, 16, 32, 64)]
_INTEGERS = [*_UNSIGNED, *(f"s{bits}" for bits in (8, 16, 32, 64))]
_SPECIAL = {"laneid": 31, "tid.x": 1023, "tid.y": 1023, "tid.z": 63}
#: After so many changes of a register nothing is known of it, so that loops come to an end.
_PATIENCE = 40


class KnownBits:
    def __init__(self, program: Program) -> None:
        self._shared = program.shared
        self._bits: dict[int, int] = {}
        changes: dict[int, int] = {}
        items = [item for block in program.blocks for item in block.instructions]
        again = True
        while again:
            again = False
            for item in items:
                for target in registers_of(*item.operands[:1]):
                    before = self._bits.get(target.index, 0)
                    after = before | self._result(item, target)
                    if after == before:
                        continue
                    again = True
                    changes[target.index] = changes.get(target.index, 0) + 1
                    every = (1 << target.bits) - 1
                    self._bits[target.index] = every if changes[target.index] > _PATIENCE else after

    def may_be_one(self, operand: Operand, bits: int) -> int:
        """Bits of an operand that is seen as an integer of so many."""
        every = (1 << bits) - 1
        match operand:
            case Immediate() if not operand.float_bits:
                return operand.value & every
            case Register():
                return self._bits.get(operand.index, 0) & every
            case Special():
                return _SPECIAL.get(operand.name, every) & every
            case Symbol() if operand.name in self._shared:
                place = self._shared[operand.name] + operand.offset
                return _SHARED & -(place & -place or 1 << 10) & every
        return every

    def _result(self, item: Instruction, target: Register) -> int:
        every = (1 << target.bits) - 1
        if item.operands[0] != target or target.bits == 1 or item.type not in _INTEGERS or item.has("sat"):
            return every
        bits = TYPE_BITS[item.type]
        values = [self.may_be_one(operand, bits) for operand in item.operands[1:]]
        amount = item.operands[2].value if len(values) > 1 and isinstance(item.operands[2], Immediate) else None
        match item.name:
            case "mov" if len(values) == 1:
                return values[0] & every
            # A signed source or result extends its sign.
            case "cvt" if len(values) == 1 and item.type[0] != "s" and item.opcode[-2] in _UNSIGNED:
                return values[0] & every
            case "and":
                return values[0] & values[1] & every
            case "or" | "xor":
                return (values[0] | values[1]) & every
            case "selp":
                return (values[0] | values[1]) & every
            case "shl" if amount is not None:
                return values[0] << amount & (1 << bits) - 1 & every
            case "shr" if amount is not None and item.type[0] != "s":
                return values[0] >> amount & every
            case "add":
                return _sum(values[0], values[1], bits) & every
        return every


def _sum(one: int, other: int, bits: int) -> int:
    """Where a digit or a carry may be."""
    found = carry = 0
    for bit in range(bits):
        ones = (one >> bit & 1) + (other >> bit & 1) + carry
        found |= (ones > 0) << bit
        carry = ones > 1
    return found
