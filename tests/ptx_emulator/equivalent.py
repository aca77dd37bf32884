"""Mutations that no test can notice, by rule: what they would change reaches nothing, or comes to the same.

- What is read by hints alone, or by nothing that was executed: cache policies, the time for which a wait may suspend a
  thread. Only ways and guarded instructions that some thread took count as executed (coverage.py); what tests do not
  execute is not mutated either.
- The correction of a signed division for dividends below zero, which sizes and indices never are.
- A branch around code that does nothing else, or between two ways that do the same but for hints, or to a trap that no
  test comes to, which is an assertion.
- A register set to the number that it has.
- A difference with its terms swapped whose sign nothing asks for: it is squared, or made positive.
- How far a shuffle from lane 0 may reach.
- Another number that is not zero either, where nothing but that is asked.
- Terms swapped that are compared for being equal.
- A mask that lets the same pass, as the bits in which it differs are zero (known_bits.py).
- griddepcontrol.launch_dependents: without it launches overlap less, which no test can notice.
"""

from __future__ import annotations

from collections import Counter

from .coverage import Coverage
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
    Sink,
    Vector,
    registers_of,
)
from .known_bits import KnownBits
from .program import Program

_HINTS = ("prefetch", "prefetchu", "nanosleep", "applypriority", "discard", "pmevent", "createpolicy")
# Instructions that do nothing but write their first operand; loads that order others do more, see _is_pure.
_PURE = (
    "mov", "add", "sub", "mul", "mad", "fma", "shl", "shr", "and", "or", "xor", "not", "neg", "abs", "min", "max",
    "setp", "set", "selp", "slct", "cvt", "cvta", "ld", "lop3", "prmt", "bfe", "bfi", "shf", "rcp", "ex2", "lg2", "div",
    "rem", "sqrt", "rsqrt", "tanh", "popc", "clz", "mapa", "copysign", "testp", "bfind", "brev", "dp4a", "createpolicy",
    "shfl", "elect",
)  # fmt: skip
_BRANCHES = ("bra", "brx", "ret", "exit")
_TRAPS = ("trap", "brkpt")
_LONGEST_TWIN, _LONGEST_SEARCH = 8, 16  # blocks


class Equivalents:
    """Of a program of which tests execute `coverage`."""

    def __init__(self, program: Program, coverage: Coverage) -> None:
        flow = _Flow(program, coverage)
        self._dead = flow.dead(set())
        while more := flow.idle_branches(self._dead):
            self._dead = flow.dead(more | self._dead)
        self._corrections = _corrections(program)
        self._again = flow.set_again()
        self._known = KnownBits(program)
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
        if rule == "drop" and id(item) in self._again:
            return True
        if item.name in ("setp", "set") and rule == "swap" and item.has("eq", "ne"):
            return True
        if item.has("try_wait") and other is not None and item.operands[:3] == other.operands[:3] and rule == "shift":
            return True
        if item.name == "shfl" and rule == "shift" and other is not None and item.has("idx"):
            same = item.operands[:3] == other.operands[:3] and item.operands[4:] == other.operands[4:]
            return item.operands[2] == Immediate(0) and same
        if item.name == "and" and rule == "shift" and other is not None:
            (changed,) = [i for i in (1, 2) if item.operands[i] != other.operands[i]]
            bits = TYPE_BITS[item.type]
            before, after, value = (
                self._known.may_be_one(operand, bits)
                for operand in (item.operands[changed], other.operands[changed], item.operands[3 - changed])
            )
            return not (before ^ after) & value
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


class _Flow:
    """A program as tests execute it: only ways that they take, only instructions that some thread executes."""

    def __init__(self, program: Program, coverage: Coverage) -> None:
        self.program = program
        self.blocks = program.blocks
        taken: list[list[int]] = [[] for _ in self.blocks]
        for origin, successor in coverage.edges:
            taken[origin].append(successor)
        self.successors = taken
        self.executed = [bool(successors) for successors in taken]
        #: (instruction, registers that it sets for every thread, registers that what it does depends on), as bits.
        self.facts: list[list[tuple[Instruction, int, int]]] = []
        for number, block in enumerate(self.blocks):
            facts = []
            for index, item in enumerate(block.instructions if self.executed[number] else ()):
                place = number, index
                guard = _bits({r.index for r in registers_of(item.guard)})
                if item.guard is not None and item.name not in _BRANCHES and place not in coverage.enabled:
                    facts.append((item, 0, guard))
                    continue
                always = item.guard is None or place not in coverage.disabled
                facts.append((item, _bits(_results(item)) if always else 0, guard | _bits(_sources(item))))
            self.facts.append(facts)
        #: Registers that matter when a block begins, of the last `dead`.
        self.before = [0] * len(self.blocks)

    def dead(self, idle: set[int]) -> set[int]:
        """`id`s of instructions that only write what nothing that was executed, or only other such ones, read before it
        is written again. `idle`: those that are known to do nothing."""
        before = self.before = [0] * len(self.blocks)
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for number, successors in enumerate(self.successors):
            for successor in successors:
                if successor >= 0:
                    predecessors[successor].append(number)
        dead: set[int] = set()
        waiting = list(range(len(self.blocks)))
        queued = set(waiting)
        while waiting:
            number = waiting.pop()
            queued.discard(number)
            live = self.live_after(number)
            for item, results, sources in reversed(self.facts[number]):
                if id(item) in idle or _hints(item) or (_is_pure(item) and not _bits(_results(item)) & live):
                    dead.add(id(item))
                    continue
                dead.discard(id(item))
                if item.name in _PURE:
                    live &= ~results
                live |= sources
            if live != before[number]:
                before[number] = live
                more = [p for p in predecessors[number] if p not in queued]
                waiting += more
                queued.update(more)
        return dead

    def live_after(self, number: int) -> int:
        live = 0
        for successor in self.successors[number]:
            live |= self.before[successor] if successor >= 0 else 0
        return live

    def idle_branches(self, dead: set[int]) -> set[int]:
        """`id`s of branches that make no difference, and that are not dead: every way from them to where they meet
        again is through dead code, or both ways do the same but for hints."""
        found = set()
        for number, block in enumerate(self.blocks):
            last = block.instructions[-1] if block.instructions else None
            if last is None or last.name != "bra" or not self.executed[number] or id(last) in dead:
                continue
            if len(set(block.successors)) == 2 and (
                self._does_nothing(number, dead) or self._are_twins(number, dead) or self._asserts(number)
            ):
                found.add(id(last))
        return found

    def _asserts(self, number: int) -> bool:
        """Whether a branch only decides whether to trap, which no test does."""
        for start in self.blocks[number].successors:
            seen: set[int] = set()
            while start >= 0 and not self.executed[start] and start not in seen:
                seen.add(start)
                block = self.blocks[start]
                if any(item.name in _TRAPS for item in block.instructions):
                    return block.instructions[0].name in _TRAPS
                if len(block.successors) != 1 or any(item.name != "bra" for item in block.instructions):
                    break
                (start,) = block.successors
        return False

    def set_again(self) -> set[int]:
        """`id`s of instructions that set a register to the number that it has, wherever they are reached from."""
        before: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for successor in block.successors:
                if successor >= 0:
                    before[successor].append(number)
        found = set()
        for number, block in enumerate(self.blocks):
            for index, item in enumerate(block.instructions):
                if _sets_to(item) is not None and self._holds(item, number, index, before):
                    found.add(id(item))
        return found

    def _holds(self, item: Instruction, number: int, index: int, before: list[list[int]]) -> bool:
        """Whether what last wrote the register that `item` sets, on every way to it, set it to the same number."""
        register, value = item.operands[0], _sets_to(item)
        waiting, seen = [(number, index)], set()
        while waiting:
            block, end = waiting.pop()
            for other in reversed(self.blocks[block].instructions[:end]):
                if register in registers_of(*other.operands[:1]):
                    if other.operands[0] != register or _sets_to(other) != value or other is item:
                        return False
                    break
            else:
                if block == 0 or not before[block] or len(seen) > _LONGEST_SEARCH:
                    return False
                new = [b for b in before[block] if b not in seen]
                seen.update(new)
                waiting += [(b, len(self.blocks[b].instructions)) for b in new]
        return True

    def _does_nothing(self, number: int, dead: set[int]) -> bool:
        end, seen = self.blocks[number].reconvergence, {number}
        waiting = [s for s in self.blocks[number].successors if s != end]
        while waiting:
            between = waiting.pop()
            if between in seen or between < 0 or not self.executed[between]:
                return False
            seen.add(between)
            items = self.blocks[between].instructions
            if any(id(item) not in dead and (item.name != "bra" or item.guard is not None) for item in items):
                return False
            waiting += [s for s in self.blocks[between].successors if s != end]
        return True

    def _are_twins(self, number: int, dead: set[int]) -> bool:
        """What the two ways write must be the same register, or one that nothing reads where they meet."""
        end = self.blocks[number].reconvergence
        ways = [self._straight(start, end, dead) for start in self.blocks[number].successors]
        if end < 0 or None in ways or len(ways[0] or ()) != len(ways[1] or ()):
            return False
        live, renamed = self.before[end], {}
        for one, other in zip(*ways, strict=True):
            names = [[r.index for r in registers_of(item.guard, *_without_hint(item))] for item in (one, other)]
            if _shape(one) != _shape(other) or len(names[0]) != len(names[1]):
                return False
            results = _results(one) if one.name in _PURE else set()
            for a, b in zip(*names, strict=True):
                if a in results and a not in {r.index for r in registers_of(*one.operands[1:])}:
                    if a != b and live >> a & 1 | live >> b & 1:
                        return False
                    renamed[a] = b
                elif renamed.get(a, a) != b or (a not in renamed and b in renamed.values()):
                    return False
        return True

    def _straight(self, start: int, end: int, dead: set[int]) -> list[Instruction] | None:
        """What a way without branches executes, but for dead code."""
        found: list[Instruction] = []
        for _ in range(_LONGEST_TWIN):
            if start == end:
                return found
            block = self.blocks[start] if start >= 0 else None
            if block is None or len(block.successors) != 1:
                return None
            found += [item for item in block.instructions if id(item) not in dead and item.name != "bra"]
            (start,) = block.successors
        return None


def _sets_to(item: Instruction) -> int | None:
    """The number that a mov sets a register to for every thread."""
    if item.name != "mov" or item.guard is not None or not isinstance(item.operands[0], Register):
        return None
    source = item.operands[1]
    return source.value if isinstance(source, Immediate) else None


def _without_hint(item: Instruction) -> tuple[Operand, ...]:
    return item.operands[:-1] if item.has("L2::cache_hint") else item.operands


def _shape(item: Instruction) -> tuple[object, ...]:
    """An instruction without the names of its registers and its hint."""
    opcode = tuple(part for part in item.opcode if part != "L2::cache_hint")
    return opcode, item.guard is None, item.guard_negated, tuple(map(_nameless, _without_hint(item)))


def _nameless(operand: Operand | None) -> object:
    match operand:
        case Register():
            return operand.type
        case Address():
            return "[]", _nameless(operand.base), operand.offset, _nameless(operand.coordinates)
        case Vector() | Group():
            return tuple(map(_nameless, operand.items))
        case Pair():
            return _nameless(operand.first), _nameless(operand.second)
        case Negated():
            return "!", _nameless(operand.operand)
    return operand


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
