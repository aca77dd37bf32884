"""Mutations of a kernel: one instruction of its program broken by a rule.

- drop: the instruction is not there;
- flip: its guard, its comparison or its operation is the opposite one;
- shift: a constant is one more, an address one word further;
- swap: two of its sources change places.

Left out is what cannot matter: instructions whose results nothing uses but hints (cache policies, the time for which a
wait may suspend a thread), hints themselves, and the correction of a signed division for dividends below zero, which
sizes and indices never are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codegen import Compiler
from .ir import Address, Immediate, Instruction, Operand, Register, Sink, Vector, registers_of
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
_COMMUTES = ("add", "mul", "min", "max", "and", "or", "xor", "fma", "mad", "st", "call")
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


_HINTS = ("prefetch", "prefetchu", "nanosleep", "applypriority", "discard", "pmevent", "createpolicy")
# Instructions that do nothing but write their first operand.
_PURE = (
    "mov", "add", "sub", "mul", "mad", "fma", "shl", "shr", "and", "or", "xor", "not", "neg", "abs", "min", "max",
    "setp", "set", "selp", "slct", "cvt", "cvta", "ld", "lop3", "prmt", "bfe", "bfi", "shf", "rcp", "ex2", "lg2", "div",
    "rem", "sqrt", "rsqrt", "tanh", "popc", "clz", "mapa", "copysign", "testp", "bfind", "brev", "dp4a", "createpolicy",
)  # fmt: skip


def _shifted(operand: Operand) -> Operand | None:
    if isinstance(operand, Immediate) and operand.float_bits:
        as_integer, as_float = (np.dtype(f"{kind}{operand.float_bits // 8}") for kind in "uf")
        value = np.array([operand.value], as_integer).view(as_float) + as_float.type(1)
        return replace(operand, value=int(value.view(as_integer)[0]))
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
        if (other := _shifted(operand)) is not None:
            yield "shift", replace(item, operands=(*operands[:position], other, *operands[position + 1 :]))
    if item.name not in _COMMUTES:
        for first in range(1, len(operands) - 1):
            a, b = operands[first], operands[first + 1]
            same = isinstance(a, Register) and isinstance(b, Register) and a.bits == b.bits
            if a != b and (same or (isinstance(a, Vector) and isinstance(b, Vector))):
                yield "swap", replace(item, operands=(*operands[:first], b, a, *operands[first + 2 :]))


def draw(program: Program, executed: list[int], count: int, seed: int) -> list[tuple[Mutation, Instruction | None]]:
    """`count` mutations of instructions in blocks that were executed, no two alike."""
    places = [(b, i) for b, times in enumerate(executed) if times for i in range(len(program.blocks[b].instructions))]
    choice = random.Random(seed)
    choice.shuffle(places)
    dead, corrections = _dead(program), _corrections(program)
    found = []
    for block, index in places:
        item = program.blocks[block].instructions[index]
        if id(item) in dead or item.has("launch_dependents"):
            continue
        options = [v for v in variants(item) if (id(item), v[0]) not in corrections]
        if options:
            rule, other = choice.choice(options)
            after = None if other is None else _text(other)
            found.append((Mutation(program.name, item.line, rule, item.text, after, block, index), other))
    return found[:count]


def _results(item: Instruction) -> set[int]:
    return {r.index for r in registers_of(*item.operands[:1])}


def _sources(item: Instruction) -> set[int]:
    """Registers that what an instruction does depends on, but for hints."""
    operands = item.operands[1:] if item.name in _PURE else item.operands
    if item.has("L2::cache_hint"):
        operands = operands[:-1]
    if item.has("try_wait"):
        operands = operands[:3]
    return {r.index for r in registers_of(item.guard, *operands)}


def _dead(program: Program) -> set[int]:
    """`id`s of instructions that only write what nothing, or only other such ones, read before it is written again."""
    blocks = program.blocks
    before = [0] * len(blocks)  # registers that matter when a block begins, as bits
    predecessors: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            if successor >= 0:
                predecessors[successor].append(number)
    facts = [
        [(i, _bits(_results(i)) if i.name in _PURE else 0, _bits(_sources(i))) for i in block.instructions]
        for block in blocks
    ]
    dead: set[int] = set()
    waiting = list(range(len(blocks)))
    queued = set(waiting)
    while waiting:
        number = waiting.pop()
        queued.discard(number)
        live = 0
        for successor in blocks[number].successors:
            live |= before[successor] if successor >= 0 else 0
        for item, results, sources in reversed(facts[number]):
            if item.name in _HINTS or (item.name in _PURE and not results & live):
                dead.add(id(item))
                continue
            dead.discard(id(item))
            if item.guard is None:
                live &= ~results
            live |= sources
        if live != before[number]:
            before[number] = live
            more = [p for p in predecessors[number] if p not in queued]
            waiting += more
            queued.update(more)
    return dead


def _bits(registers: set[int]) -> int:
    bits = 0
    for register in registers:
        bits |= 1 << register
    return bits


def _corrections(program: Program) -> set[tuple[int, str]]:
    """(instruction, rule) of x + (x >>> n) or x + (x >> 31 >>> n) where n is so large that this adds nothing to an x
    that is not below zero."""
    found: set[tuple[int, str]] = set()
    signs: dict[int, Instruction] = {}  # register: what made it of a sign
    tops: dict[int, Instruction] = {}  # of the highest bits of another
    for item in (item for block in program.blocks for item in block.instructions):
        target, *sources = item.operands[:3] if item.operands else (Sink(),)
        if item.name == "shr" and isinstance(target, Register) and isinstance(sources[1], Immediate):
            bits = int(item.type[1:])
            of_sign = isinstance(sources[0], Register) and sources[0].index in signs
            if item.type[0] == "s" and sources[1].value == bits - 1:
                signs[target.index] = item
                found.add((id(item), "shift"))
            elif of_sign or sources[1].value > bits // 2:
                (signs if of_sign else tops)[target.index] = item
                found |= {(id(item), rule) for rule in ("shift", "flip") if of_sign}
        elif item.name == "add" and isinstance(sources[1], Register):
            top = tops.get(sources[1].index)
            if top is not None and top.operands[1] == sources[0]:
                found |= {(id(item), "flip"), (id(top), "shift")}
            elif sources[1].index in signs:
                found.add((id(item), "flip"))
    return found


def _text(item: Instruction) -> str:
    guard = f"@{'!' if item.guard_negated else ''}{item.guard} " if item.guard is not None else ""
    return f"{guard}{'.'.join(item.opcode)} {item.operands}"


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
