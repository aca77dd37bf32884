"""Mutations of a kernel: one instruction of its program broken by a rule.

- drop: the instruction is not there;
- flip: its guard, its comparison or its operation is the opposite one;
- shift: a constant is one more, a mask moves by one bit, a number in floating point doubles, an address is one word
  further;
- swap: two of its sources change places.

What no test can notice is left out, see equivalent.py. Of the copies of an instruction that unrolling makes, one stands
for all: mutations are alike whose rule is the same, and the opcode, the kinds of its operands, the opcodes of what
writes what it reads and of what reads what it writes, and numbers in floating point.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codegen import Compiler
from .coverage import Coverage
from .equivalent import Equivalents
from .ir import (
    TYPE_BITS,
    Address,
    Group,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
    registers_of,
)  # fmt: skip
from .launch import LoadedModule
from .program import Program
from .special import special_register

Lanes = NDArray[Any]
_OPPOSITES = (
    ("lt", "ge"), ("le", "gt"), ("eq", "ne"), ("lo", "hs"), ("ls", "hi"), ("add", "sub"), ("and", "or"),
    ("min", "max"), ("shl", "shr"), ("inc", "dec"),
)  # fmt: skip
_FLIPPED = {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}
_ENDS = ("bra", "brx", "ret", "exit", "trap")
_COMMUTES = ("add", "mul", "min", "max", "and", "or", "xor", "st", "call")
_MASKS = ("and", "or", "xor")
_WORD = 4


@dataclass(frozen=True)
class Mutation:
    kernel: str
    line: int
    rule: str
    before: str
    after: str | None
    block: int
    index: int


def _shifted(item: Instruction, operand: Operand) -> Operand | None:
    if isinstance(operand, Immediate) and operand.float_bits:
        as_integer, as_float = (np.dtype(f"{kind}{operand.float_bits // 8}") for kind in "uf")
        value = np.array([operand.value], as_integer).view(as_float)
        with np.errstate(over="ignore"):
            doubled = value * as_float.type(2) if value[0] and np.isfinite(value[0]) else np.ones_like(value)
        return replace(operand, value=int(doubled.view(as_integer)[0]))
    if isinstance(operand, Immediate) and item.name in _MASKS and operand.value:
        return replace(operand, value=operand.value << 1 & (1 << TYPE_BITS[item.type]) - 1)
    if isinstance(operand, Immediate):
        return replace(operand, value=operand.value + 1)
    if isinstance(operand, Address):
        return replace(operand, offset=operand.offset + _WORD)
    return None


def variants(item: Instruction) -> Iterator[tuple[str, Instruction | None]]:
    """(rule, what stands in the instruction's place)."""
    if item.name not in _ENDS:
        yield "drop", None
    if item.guard is not None:
        yield "flip", replace(item, guard_negated=not item.guard_negated)
    for position, part in enumerate(item.opcode):
        if part in _FLIPPED and (position == 0 or item.name in ("setp", "set", "atom", "red", "setmaxnreg")):
            yield "flip", replace(item, opcode=(*item.opcode[:position], _FLIPPED[part], *item.opcode[position + 1 :]))
    operands = item.operands
    for position, operand in enumerate(operands):
        if (other := _shifted(item, operand)) is not None:
            yield "shift", replace(item, operands=(*operands[:position], other, *operands[position + 1 :]))
    if item.name not in _COMMUTES:
        for first in range(2 if item.name in ("fma", "mad") else 1, len(operands) - 1):
            a, b = operands[first], operands[first + 1]
            same = isinstance(a, Register) and isinstance(b, Register) and a.bits == b.bits
            if a != b and (same or (isinstance(a, Vector) and isinstance(b, Vector))):
                yield "swap", replace(item, operands=(*operands[:first], b, a, *operands[first + 2 :]))


class Population:
    """The mutations of a program of which tests execute `coverage`."""

    def __init__(self, program: Program, coverage: Coverage) -> None:
        self.program = program
        self._equivalents = Equivalents(program, coverage)
        blocks = [(number, len(program.blocks[number].instructions)) for number in sorted(coverage.blocks())]
        places = [(number, index) for number, count in blocks for index in range(count)]
        self._executed = [place for place in places if place in coverage.enabled or not self._may_be_passed_over(place)]

    def _at(self, place: tuple[int, int]) -> Instruction:
        return self.program.blocks[place[0]].instructions[place[1]]

    def _may_be_passed_over(self, place: tuple[int, int]) -> bool:
        item = self._at(place)
        return item.guard is not None and item.name not in _ENDS

    def _of(self, item: Instruction) -> list[tuple[str, Instruction | None]]:
        return [(rule, other) for rule, other in variants(item) if not self._equivalents.unseen(item, rule, other)]

    def counts(self) -> tuple[int, int, int]:
        """Mutations of all instructions, of those that were executed, and of these those that are not left out."""
        every = sum(len(list(variants(item))) for block in self.program.blocks for item in block.instructions)
        executed = [self._at(place) for place in self._executed]
        return every, sum(len(list(variants(i))) for i in executed), sum(len(self._of(i)) for i in executed)

    def draw(self, count: int, seed: int, seen: set[object] | None = None) -> list[tuple[Mutation, Instruction | None]]:
        """`count` mutations of instructions that were executed, no two alike, and none like those of other kernels that
        are in `seen`."""
        name = self.program.name
        # What is drawn of an instruction depends on nothing else, so that tests may be added between two runs.
        chance = {place: random.Random(f"{seed} {name} {place}") for place in self._executed}
        uses = _Uses(self.program)
        found: list[tuple[Mutation, Instruction | None]] = []
        seen = set() if seen is None else seen
        for place in sorted(self._executed, key=lambda place: chance[place].random()):
            item = self._at(place)
            options = self._of(item)
            if not options:
                continue
            rule, other = chance[place].choice(options)
            alike = rule, _shape(item), other and _shape(other), uses.of(item)
            if alike not in seen:
                seen.add(alike)
                after = None if other is None else _text(other)
                found.append((Mutation(name, item.line, rule, item.text, after, *place), other))
                if len(found) == count:
                    break
        return found


class _Uses:
    """What instructions read and are read by, which says whether one is another's copy."""

    def __init__(self, program: Program) -> None:
        self._writers: dict[int, set[tuple[str, ...]]] = {}
        self._readers: dict[int, set[tuple[str, ...]]] = {}
        for item in (item for block in program.blocks for item in block.instructions):
            for register in registers_of(*item.operands[:1]):
                self._writers.setdefault(register.index, set()).add(item.opcode)
            for register in registers_of(item.guard, *item.operands[1:]):
                self._readers.setdefault(register.index, set()).add(item.opcode)

    def of(self, item: Instruction) -> tuple[object, ...]:
        read = [frozenset(self._writers.get(r.index, ())) for r in registers_of(item.guard, *item.operands[1:])]
        written = [frozenset(self._readers.get(r.index, ())) for r in registers_of(*item.operands[:1])]
        numbers = [o.value for o in item.operands if isinstance(o, Immediate) and o.float_bits]
        return tuple(read), tuple(written), tuple(numbers)


def _shape(item: Instruction) -> tuple[object, ...]:
    return item.opcode, item.guard is None, item.guard_negated, tuple(type(operand) for operand in item.operands)


def _text(item: Instruction) -> str:
    guard = f"@{'!' if item.guard_negated else ''}{item.guard.name} " if item.guard is not None else ""
    return f"{guard}{'.'.join(item.opcode)} {', '.join(map(_spelled, item.operands))};"


def _spelled(operand: Operand) -> str:
    match operand:
        case Register() | Special():
            return operand.name
        case Immediate():
            return f"0x{operand.value:X}" if operand.float_bits else str(operand.value)
        case Symbol():
            return operand.name + (f"+{operand.offset}" if operand.offset else "")
        case Address():
            coordinates = f", {_spelled(operand.coordinates)}" if operand.coordinates is not None else ""
            return f"[{_spelled(operand.base)}+{operand.offset}{coordinates}]"
        case Pair():
            return f"{_spelled(operand.first)}|{_spelled(operand.second)}"
        case Negated():
            return f"!{_spelled(operand.operand)}"
        case Vector() | Group():
            return f"{{{', '.join(map(_spelled, operand.items))}}}"
    return "_"


def again(program: Program, known: Mutation) -> Instruction | None:
    """What stood in the instruction's place when a mutation was drawn."""
    item = program.blocks[known.block].instructions[known.index]
    found = [o for rule, o in variants(item) if rule == known.rule and (None if o is None else _text(o)) == known.after]
    if not found or item.text != known.before:
        raise LookupError(f"{known.before} at line {known.line} is not what the kernel has there: {item.text}")
    return found[0]


def apply(module: LoadedModule, mutation: Mutation, other: Instruction | None) -> None:
    """From now on the module's kernel has the mutation. What was compiled is kept where it is the same code."""
    program, compiler = module.program(mutation.kernel)
    blocks = list(program.blocks)
    instructions = list(blocks[mutation.block].instructions)
    instructions[mutation.index : mutation.index + 1] = [] if other is None else [other]
    blocks[mutation.block] = replace(blocks[mutation.block], instructions=instructions)
    mutated = replace(program, blocks=blocks)
    mutant = Compiler(mutated, module, special_register)
    if mutant.home == compiler.home and _same(mutant.constants, compiler.constants):
        for functions, kept in zip(mutant.functions, compiler.functions, strict=True):
            functions[:] = kept
            functions[mutation.block] = None
        mutant.origins.update(compiler.origins)
    module.replace(mutation.kernel, mutated, mutant)


def _same(constants: dict[int, Lanes], others: dict[int, Lanes]) -> bool:
    return constants.keys() == others.keys() and all(np.array_equal(c, others[r]) for r, c in constants.items())
