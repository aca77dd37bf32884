"""Mutations of a kernel: one instruction of its program broken by a rule.

- drop: the instruction is not there;
- flip: its guard, its comparison or its operation is the opposite one;
- shift: a constant is one more, a mask moves by one bit, a number in floating point doubles, an address is one word
  further;
- swap: two of its sources change places.

What no test can notice is left out, see equivalent.py. Of the copies of an instruction that unrolling makes, one stands
for all: mutations are alike whose rule is the same, and the opcode, the kinds of its operands, and the opcodes around.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codegen import Compiler
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
# Instructions before and after one that say whether another is its copy.
_AROUND = 2


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


def draw(
    program: Program, executed: list[int], count: int, seed: int, seen: set[object] | None = None
) -> list[tuple[Mutation, Instruction | None]]:
    """`count` mutations of instructions in blocks that were executed, no two alike, and none like those of other
    kernels that are in `seen`."""
    places = [(b, i) for b, times in enumerate(executed) if times for i in range(len(program.blocks[b].instructions))]
    # What is drawn of an instruction depends on nothing else, so that tests may be added between two runs.
    chance = {place: random.Random(f"{seed} {program.name} {place}") for place in places}
    places.sort(key=lambda place: chance[place].random())
    equivalents = Equivalents(program, executed)
    found = []
    seen = set() if seen is None else seen
    for block, index in places:
        item = program.blocks[block].instructions[index]
        options = [(rule, other) for rule, other in variants(item) if not equivalents.unseen(item, rule, other)]
        if not options:
            continue
        rule, other = chance[block, index].choice(options)
        around = program.blocks[block].instructions[max(index - _AROUND, 0) : index + _AROUND + 1]
        alike = rule, _shape(item), other and _shape(other), tuple(near.opcode for near in around)
        if alike not in seen:
            seen.add(alike)
            after = None if other is None else _text(other)
            found.append((Mutation(program.name, item.line, rule, item.text, after, block, index), other))
            if len(found) == count:
                break
    return found


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
