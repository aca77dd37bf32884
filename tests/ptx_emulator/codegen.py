"""Basic blocks to Python functions over numpy lanes.

A register holds one array of 32 lanes: uint8/16/32/64 by its width, bool for predicates, uint64 [32, 2] for b128.
Arrays are never changed in place, so registers may share them. Every block is compiled at first use, in one version for
a whole warp and one for a part of it, which merges results under a lane mask. A register that only one block knows is a
local variable there, of the type that was computed, and not merged. A block function returns the next block's number,
EXIT, STAY (blocked: run the block again), or where lanes diverge ([(block, lanes), ...], reconvergence block).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError, UnknownInstructionError
from .ir import (
    TYPE_BITS,
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    registers_of,
)
from .machine import Fragment, Warp, lane_bits
from .program import Program

if TYPE_CHECKING:
    from .launch import LoadedModule

STAY = -2
NO_LANE = bytes(32)
EVERY_LANE = bytes([1]) * 32
BlockFunction = Callable[[Warp, Fragment, list[Any], Any], Any]
Handler = Callable[["Emitter", Instruction], None]
_HANDLERS: dict[str, Handler] = {}

STORAGE = {
    1: np.dtype(np.bool_),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "f16x2": np.float16, "f32x2": np.float32}


def view_dtype(type_name: str) -> np.dtype[Any]:
    """The element type in which an instruction type computes; packed types give twice the elements."""
    if type_name == "pred":
        return STORAGE[1]
    if type_name in _FLOATS:
        return np.dtype(_FLOATS[type_name])
    if type_name in ("s16x2", "u16x2", "bf16x2"):
        return np.dtype(np.int16 if type_name[0] == "s" else np.uint16)
    size = min(TYPE_BITS[type_name] // 8, 8)
    return np.dtype(f"{'i' if type_name[0] == 's' else 'u'}{size}")


def instruction(*names: str) -> Callable[[Handler], Handler]:
    """Register the handler that emits code for instructions of these names, or names with their first modifier."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


class Emitter:
    """Emits the code of one block in one version."""

    def __init__(self, compiler: Compiler, number: int, full: bool) -> None:
        self.compiler = compiler
        self.program = compiler.program
        self.number = number
        self.block = compiler.program.blocks[number]
        self.full = full
        self.lines: list[str] = []
        self.origins: list[Instruction | None] = []
        self.current: Instruction | None = None
        self.index = 0  # of that, in its block
        self.mask = "m"
        self.indent = 1
        self._temporary = 0
        self._local: dict[int, np.dtype[Any] | None] = {}  # registers in local variables: the type of their lanes
        self._kept: set[int] = set()  # registers that the warp keeps

    @property
    def unmasked(self) -> bool:
        return self.full and self.mask == "m"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)
        self.origins.append(self.current)

    def name(self, value: Any) -> str:
        """A name for a Python object inside the generated code."""
        return self.compiler.bind(value)

    def temporary(self) -> str:
        self._temporary += 1
        return f"t{self._temporary}"

    def fail(self, reason: str = "is not implemented") -> UnknownInstructionError:
        assert self.current is not None
        return UnknownInstructionError(f"line {self.current.line}: {reason}: {self.current.text}")

    # -- operands -------------------------------------------------------------------------------------------------

    def value(self, operand: Operand, type_name: str) -> str:
        """An expression for the lanes of an operand seen as a type."""
        dtype = view_dtype(type_name)
        bits = TYPE_BITS[type_name]
        if isinstance(operand, Register):
            if bits == 1 or operand.bits == 1 or bits == 128:
                return self.register(operand)
            if operand.bits == bits:
                return self.register(operand, dtype)
            text = f"{self.register(operand)}.astype({self.name(STORAGE[bits])})"
            return text if dtype == STORAGE[bits] else f"{text}.view({self.name(dtype)})"
        if isinstance(operand, Immediate):
            return self.constant(operand, type_name)
        if isinstance(operand, Special):
            text = f"{self.name(self.compiler.special)}(w, {operand.name!r})"
            if bits != 32 or operand.name.startswith(("clock", "globaltimer")):
                text += f".astype({self.name(STORAGE[bits])})"
            return text if dtype == STORAGE[bits] else f"{text}.view({self.name(dtype)})"
        if isinstance(operand, Symbol):
            return self.symbol(operand, bits)
        if isinstance(operand, Negated):
            return f"(~{self.value(operand.operand, type_name)})"
        raise self.fail(f"operand {operand} is not supported")

    def register(self, register: Register, dtype: np.dtype[Any] | None = None) -> str:
        """An expression for the lanes of a register, seen as another type of its width where `dtype` says so."""
        storage = STORAGE.get(register.bits)
        wanted = dtype or storage
        constant = self.compiler.constants.get(register.index)
        if constant is not None:
            return self.name(constant.view(wanted))
        if register.index in self._local:
            text, held = f"r{register.index}", self._local[register.index]
        else:
            self._kept.add(register.index)
            text, held = f"R[{register.index}]", storage
        return text if held == wanted else f"{text}.view({self.name(wanted)})"

    def known(self, operand: Operand) -> int | None:
        """The unsigned value of an operand that is the same whenever the code runs."""
        if isinstance(operand, Immediate):
            return operand.value & 0xFFFFFFFF
        lanes = self.compiler.constants.get(operand.index) if isinstance(operand, Register) else None
        return None if lanes is None else int(lanes[0])

    def constant(self, operand: Immediate, type_name: str) -> str:
        return self.name(immediate_lanes(operand, type_name).view(view_dtype(type_name)))

    def symbol(self, operand: Symbol, bits: int) -> str:
        program = self.program
        if operand.name in program.shared:
            return f"{self.name(_shared_address)}(w, {program.shared[operand.name] + operand.offset}, {bits // 8})"
        return self.name(self.compiler.symbol_lanes(operand, bits))

    def address(self, operand: Operand) -> str:
        """Lane addresses of `[base + offset]`: uint32 or uint64 by the base register."""
        if not isinstance(operand, Address):
            raise self.fail("expected an address")
        base = operand.base
        if isinstance(base, Register):
            text, bits = self.register(base), base.bits
        elif isinstance(base, Symbol):
            bits = 32 if base.name in self.program.shared else 64
            return self.symbol(Symbol(base.name, base.offset + operand.offset), bits)
        elif isinstance(base, Immediate):
            return self.constant(Immediate(base.value + operand.offset), "u64")
        else:
            raise self.fail("unsupported address")
        if operand.offset:
            lanes = np.full(32, operand.offset & ((1 << bits) - 1), f"u{bits // 8}")
            return f"({text} + {self.name(lanes)})"
        return text

    # -- results --------------------------------------------------------------------------------------------------

    def assign(self, operand: Operand, expression: str, type_name: str) -> None:
        """Write lanes (of the type's view dtype) to a register under the mask."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise self.fail("expected a register")
        bits, index = TYPE_BITS[type_name], operand.index
        storage = STORAGE.get(operand.bits)
        dtype = storage if operand.bits in (1, 128) else view_dtype(type_name)
        if operand.bits not in (1, 128, bits):
            expression, dtype = f"({expression}).astype({self.name(storage)})", storage
        own = index in self._local or (index not in self._kept and self.compiler.home[index] == self.number)
        if own and self.mask == "m":
            self._local[index] = dtype
            self.line(f"r{index} = {expression}")
            return
        held = self._local.get(index, storage)
        old = self.register(operand, held)
        target = f"r{index}" if index in self._local else f"R[{index}]"
        if dtype != held:
            expression = f"({expression}).view({self.name(held)})"
        if self.unmasked:
            self.line(f"{target} = {expression}")
        else:
            mask = f"{self.mask}[:, None]" if operand.bits == 128 else self.mask
            self.line(f"{target} = {self.name(np.where)}({mask}, {expression}, {old})")

    def merge_call(self, function: Any, arguments: str, results: list[Operand], type_name: str) -> None:
        """Call a runtime function that returns a list of lane arrays, one per result."""
        name = self.temporary()
        self.line(f"{name} = {self.name(function)}({arguments})")
        for index, operand in enumerate(results):
            self.assign(operand, f"{name}[{index}]", type_name)

    def bound(self, values: list[str]) -> str:
        return "(" + "".join(f"{v}, " for v in values) + ")"

    # -- blocks ---------------------------------------------------------------------------------------------------

    def emit(self, item: Instruction) -> None:
        self.current = item
        handler = _HANDLERS.get(".".join(item.opcode[:2])) or _HANDLERS.get(item.name)
        if handler is None:
            raise self.fail("unknown instruction")
        if item.guard is None or item.name in ("bra", "brx", "ret", "exit"):
            handler(self, item)
            return
        sign = "~" if item.guard_negated else ""
        register = self.register(item.guard)
        self.line(f"g = {sign}{register}" if self.full else f"g = {sign}{register} & m")
        self.line(f"if g.tobytes() != {self.name(NO_LANE)}:")
        self.mask = "g"
        self.indent += 1
        handler(self, item)
        if self.lines[-1].endswith(":"):
            self.line("pass")
        self.indent -= 1
        self.mask = "m"


def _shared_address(warp: Warp, offset: int, width: int) -> Any:
    constants = warp.cta.constants
    found = constants.get((offset, width))
    if found is None:
        found = constants[offset, width] = np.full(32, warp.cta.shared_base + offset, f"u{width}")
    return found


def immediate_lanes(operand: Immediate, type_name: str) -> NDArray[Any]:
    """A literal of a type, in its unsigned storage."""
    bits = TYPE_BITS[type_name]
    if bits == 1:
        return np.full(32, operand.value != 0)
    number = operand.value
    if operand.float_bits and operand.float_bits != bits and type_name in ("f16", "f32", "f64"):
        source = np.array([number], f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
        number = int(source.astype(f"f{bits // 8}").view(f"u{bits // 8}")[0])
    return np.full(32, number & ((1 << bits) - 1), f"u{bits // 8}")


class Compiler:
    """Compiles the blocks of a program, on demand.

    `home`: the only block that knows a register, or -1. `constants`: lanes of registers that one instruction sets, to
    the same whenever it runs.
    """

    def __init__(self, program: Program, module: LoadedModule, special: Callable[..., Any]) -> None:
        self.program = program
        self.module = module
        self.special = special
        self.namespace: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._kept: list[Any] = []
        self.origins: dict[str, list[Instruction | None]] = {}
        self.functions: tuple[list[BlockFunction | None], list[BlockFunction | None]] = (
            [None] * len(program.blocks),
            [None] * len(program.blocks),
        )
        self.home: dict[int, int] = {}
        writes: Counter[int] = Counter()
        for number, block in enumerate(program.blocks):
            for item in block.instructions:
                writes.update(r.index for r in registers_of(*item.operands[:1]))
                for register in registers_of(item.guard, *item.operands):
                    if self.home.setdefault(register.index, number) != number:
                        self.home[register.index] = -1
        self.constants: dict[int, NDArray[Any]] = {}
        for item in (item for block in program.blocks for item in block.instructions if item.name == "mov"):
            target, source = item.operands
            if isinstance(target, Register) and item.guard is None and writes[target.index] == 1:
                lanes = self._constant(source, item.type)
                if lanes is not None and lanes.dtype == STORAGE.get(target.bits):
                    self.constants[target.index] = lanes

    def _constant(self, operand: Operand, type_name: str) -> NDArray[Any] | None:
        if isinstance(operand, Immediate):
            return immediate_lanes(operand, type_name)
        if isinstance(operand, Symbol) and operand.name in {**self.program.local, **self.program.params}:
            return self.symbol_lanes(operand, TYPE_BITS[type_name])
        return self.constants.get(operand.index) if isinstance(operand, Register) else None

    def symbol_lanes(self, operand: Symbol, bits: int) -> NDArray[Any]:
        """The address of a variable that is not in shared memory."""
        offsets = self.program.local if operand.name in self.program.local else self.program.params
        base = offsets[operand.name] if operand.name in offsets else self.module.address(operand.name)
        return np.full(32, (base + operand.offset) & ((1 << bits) - 1), f"u{bits // 8}")

    def bind(self, value: Any) -> str:
        key: Any = id(value)
        if isinstance(value, np.ndarray):
            key = (value.dtype.str, value.shape, value.tobytes())
        elif isinstance(value, (np.dtype, bytes, str, int)):
            key = (type(value), value)
        found = self._names.get(key)
        if found is None:
            found = self._names[key] = f"k{len(self._names)}"
            self.namespace[found] = value
            self._kept.append(value)
        return found

    def compile(self, number: int, full: bool) -> BlockFunction:
        """The function of a block for a whole warp or a part; kept in `functions[full][number]`."""
        emitter = Emitter(self, number, full)
        block = emitter.block
        for emitter.index, item in enumerate(block.instructions):
            emitter.emit(item)
        if not block.instructions or block.instructions[-1].name not in ("bra", "brx", "ret", "exit", "trap"):
            emitter.current = None
            emitter.line(f"return {block.successors[0]}")
        filename = f"<ptx {self.program.name[:40]} block {number} {'full' if full else 'masked'}>"
        source = "def block(w, f, R, m):\n" + "\n".join(emitter.lines)
        self.origins[filename] = [None, *emitter.origins]
        scope: dict[str, Any] = {}
        exec(compile(source, filename, "exec"), self.namespace, scope)
        function: BlockFunction = scope["block"]
        self.functions[full][number] = function
        return function

    def instruction_at(self, error: BaseException) -> Instruction | None:
        """The PTX instruction whose generated code raised."""
        trace = error.__traceback__
        found = None
        while trace is not None:
            origins = self.origins.get(trace.tb_frame.f_code.co_filename)
            if origins is not None:
                found = origins[trace.tb_lineno - 1]
            trace = trace.tb_next
        return found


# -- branches -------------------------------------------------------------------------------------------------------


def _branch(predicate: Any, fragment: Fragment, taken: int, following: int, reconvergence: int) -> Any:
    """A guarded branch of a partly active warp; `predicate` is already restricted to the fragment's lanes."""
    bits = lane_bits(predicate)
    if bits == fragment.lanes:
        return taken
    if bits == 0:
        return following
    return [(taken, bits), (following, fragment.lanes & ~bits)], reconvergence


@instruction("bra", "ret", "exit")
def _emit_branch(e: Emitter, item: Instruction) -> None:
    block = e.block
    taken = block.successors[0]
    if item.guard is None:
        e.line(f"return {taken}")
        return
    following = block.successors[1]
    predicate = f"{'~' if item.guard_negated else ''}{e.register(item.guard)}"
    if not e.full:
        e.line(f"return {e.name(_branch)}({predicate} & m, f, {taken}, {following}, {block.reconvergence})")
        return
    e.line(f"p = {predicate}")
    e.line("b = p.tobytes()")
    e.line(f"if b == {e.name(EVERY_LANE)}: return {taken}")
    e.line(f"if b == {e.name(NO_LANE)}: return {following}")
    e.line(f"return {e.name(_branch)}(p, f, {taken}, {following}, {block.reconvergence})")


def _branch_table(indices: Any, active: Any, fragment: Fragment, targets: list[int], reconvergence: int) -> Any:
    groups: dict[int, int] = {}
    for lane in np.flatnonzero(active).tolist():
        index = int(indices[lane])
        if index >= len(targets):
            raise EmulatorError(f"brx.idx index {index} is outside its table of {len(targets)}")
        groups[targets[index]] = groups.get(targets[index], 0) | 1 << lane
    if len(groups) == 1:
        return next(iter(groups))
    return list(groups.items()), reconvergence


@instruction("brx")
def _emit_branch_table(e: Emitter, item: Instruction) -> None:
    if item.guard is not None:
        raise e.fail("guarded brx")
    targets = e.name(tuple(e.block.successors))
    index = e.value(item.operands[0], "u32")
    e.line(f"return {e.name(_branch_table)}({index}, m, f, {targets}, {e.block.reconvergence})")
