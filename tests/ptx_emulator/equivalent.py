"""Mutations that no test can notice, by rule: what they would change reaches nothing, or comes to the same.

- What is read by hints alone, or by nothing that was executed: cache policies, the time for which a wait may suspend a
  thread.
  Code that no test executes is not mutated either; that is a matter of coverage.
- The correction of a signed division for dividends below zero, which sizes and indices never are.
- A branch around code that does nothing else.
- A difference with its terms swapped whose sign nothing asks for: it is squared, or made positive.
- How far a shuffle from lane 0 may reach.
- Another number that is not zero either, where nothing but that is asked.
- Terms swapped that are compared for being equal.
- griddepcontrol.launch_dependents: without it launches overlap less, which no test can notice.
"""

from __future__ import annotations

from collections import Counter

from .ir import Immediate, Instruction, Operand, Register, Sink, registers_of
from .program import Program

_HINTS = ("prefetch", "prefetchu", "nanosleep", "applypriority", "discard", "pmevent", "createpolicy")
# Instructions that do nothing but write their first operand; loads that order others do more, see _is_pure.
_PURE = (
    "mov", "add", "sub", "mul", "mad", "fma", "shl", "shr", "and", "or", "xor", "not", "neg", "abs", "min", "max",
    "setp", "set", "selp", "slct", "cvt", "cvta", "ld", "lop3", "prmt", "bfe", "bfi", "shf", "rcp", "ex2", "lg2", "div",
    "rem", "sqrt", "rsqrt", "tanh", "popc", "clz", "mapa", "copysign", "testp", "bfind", "brev", "dp4a", "createpolicy",
    "shfl", "elect",
)  # fmt: skip


class Equivalents:
    """Of a program whose block i was executed `executed[i]` times."""

    def __init__(self, program: Program, executed: list[int]) -> None:
        self._dead = _dead(program, executed, set())
        while more := _idle_branches(program, executed, self._dead):
            self._dead = _dead(program, executed, more | self._dead)
        self._corrections = _corrections(program)
        self._readers: dict[int, list[Instruction]] = {}
        self._writers: Counter[int] = Counter()
        for item in (item for block in program.blocks for item in block.instructions):
            self._writers.update(_results(item))
            for register in _sources(item):
                self._readers.setdefault(register, []).append(item)

    def unseen(self, item: Instruction, rule: str, other: Instruction | None) -> bool:
        """Whether no test can tell `item` from `other`, which the rule puts in its place."""
        if id(item) in self._dead or (id(item), rule) in self._corrections or item.has("launch_dependents"):
            return True
        if item.name in ("setp", "set") and rule == "swap" and item.has("eq", "ne"):
            return True
        if item.has("try_wait") and other is not None and item.operands[:3] == other.operands[:3] and rule == "shift":
            return True
        if item.name == "shfl" and rule == "shift" and other is not None and item.has("idx"):
            same = item.operands[:3] == other.operands[:3] and item.operands[4:] == other.operands[4:]
            return item.operands[2] == Immediate(0) and same
        target = item.operands[0] if item.operands else None
        if not isinstance(target, Register):
            return False
        readers = self._readers.get(target.index, [])
        if item.name == "sub" and rule == "swap":
            return self._writers[target.index] == 1 and all(_takes_no_sign(reader, target) for reader in readers)
        if item.name == "mov" and rule == "shift" and other is not None:
            values = [i.operands[1].value for i in (item, other) if isinstance(i.operands[1], Immediate)]
            return len(values) == 2 and all(values) and all(_asks_for_zero(reader, target) for reader in readers)
        return False


def _is_pure(item: Instruction) -> bool:
    return item.name in _PURE and not (item.name == "ld" and item.has("acquire", "volatile"))


def _hints(item: Instruction) -> bool:
    return item.name in _HINTS or (item.name == "cp" and item.has("prefetch"))


def _takes_no_sign(item: Instruction, register: Register) -> bool:
    if item.name == "copysign":
        return item.operands[1] != register  # of which it takes nothing else
    if item.name in ("mul", "fma") and item.type[0] == "f":
        return item.operands[1:3] == (register, register) and item.operands[3:4] != (register,)
    return item.name == "abs"


def _asks_for_zero(item: Instruction, register: Register) -> bool:
    return item.name == "setp" and item.has("eq", "ne") and item.operands[1:] == (register, Immediate(0))


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


def _idle_branches(program: Program, executed: list[int], dead: set[int]) -> set[int]:
    """`id`s of branches from which every way to where they meet again is through dead code, and that are not dead."""
    found = set()
    for number, block in enumerate(program.blocks):
        if not executed[number] or not block.instructions or block.instructions[-1].name != "bra":
            continue
        if len(set(block.successors)) < 2 or id(block.instructions[-1]) in dead:
            continue
        end, seen, waiting = block.reconvergence, {number}, [s for s in block.successors if s != block.reconvergence]
        while waiting:
            between = waiting.pop()
            if between in seen or between < 0 or not executed[between]:
                break
            seen.add(between)
            items = program.blocks[between].instructions
            if any(id(item) not in dead and (item.name != "bra" or item.guard is not None) for item in items):
                break
            waiting += [s for s in program.blocks[between].successors if s != end]
        else:
            found.add(id(block.instructions[-1]))
    return found


def _dead(program: Program, executed: list[int], idle: set[int]) -> set[int]:
    """`id`s of instructions that only write what nothing that was executed, or only other such ones, read before it is
    written again. `idle`: those that are known to do nothing."""
    blocks = program.blocks
    before = [0] * len(blocks)  # registers that matter when a block begins, as bits
    predecessors: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            if successor >= 0:
                predecessors[successor].append(number)
    facts = [
        [(i, _bits(_results(i)) if i.name in _PURE else 0, _bits(_sources(i))) for i in block.instructions]
        if times
        else []
        for block, times in zip(blocks, executed, strict=True)
    ]
    dead: set[int] = set()
    waiting = list(range(len(blocks)))
    queued = set(waiting)
    while waiting:
        number = waiting.pop()
        queued.discard(number)
        live = 0
        for successor in blocks[number].successors:
            live |= before[successor] if successor >= 0 and executed[number] else 0
        for item, results, sources in reversed(facts[number]):
            if id(item) in idle or _hints(item) or (_is_pure(item) and not results & live):
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
    that is not below zero. Of other sums nothing is known."""
    found: set[tuple[int, str]] = set()
    signs: dict[int, tuple[Operand, Instruction | None]] = {}  # register: whose sign it is of, what shifted the sign
    tops: dict[int, Instruction] = {}  # of the highest bits of another
    for item in (item for block in program.blocks for item in block.instructions):
        target, *sources = item.operands[:3] if item.operands else (Sink(),)
        if item.name == "shr" and isinstance(target, Register) and isinstance(sources[1], Immediate):
            bits = int(item.type[1:])
            sign = signs.get(sources[0].index) if isinstance(sources[0], Register) else None
            if item.type[0] == "s" and sources[1].value == bits - 1:
                signs[target.index] = sources[0], None
                found.add((id(item), "shift"))  # the same: PTX shifts by no more than the width
            elif sign is not None:
                signs[target.index] = sign[0], item
            elif sources[1].value > bits // 2:
                tops[target.index] = item
        elif item.name == "add" and isinstance(sources[1], Register):
            top, sign = tops.get(sources[1].index), signs.get(sources[1].index)
            if top is not None and top.operands[1] == sources[0]:
                found |= {(id(item), "flip"), (id(top), "shift")}
            elif sign is not None and sign[0] == sources[0]:
                found.add((id(item), "flip"))
                if sign[1] is not None:
                    found |= {(id(sign[1]), rule) for rule in ("shift", "flip")}
    return found
