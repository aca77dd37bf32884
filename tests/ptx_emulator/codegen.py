"""Basic blocks to Python functions over numpy lanes.

A register holds one array of 32 lanes: uint8/16/32/64 by its width, bool for predicates, uint64 [32, 2] for b128.
Arrays are never changed in place, so registers may share them. Every block is compiled at first use, in one version for
a whole warp and one for a part of it, which merges results under a lane mask. A block function returns the next block's
number, EXIT, STAY (blocked: run the block again), or where lanes diverge ([(block, lanes), ...], reconvergence block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import EmulatorError, UnknownInstructionError
from .ir import (
    TYPE_BITS,
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from .machine import Fragment, Warp, lane_bits
from .program import EXIT, Program

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
        self.block = compiler.program.blocks[number]
        self.full = full
        self.lines: list[str] = []
        self.origins: list[Instruction | None] = []
        self.current: Instruction | None = None
        self.mask = "m"
        self.indent = 1
        self._temporary = 0

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
            text = f"R[{operand.index}]"
            if bits == 1 or operand.bits == 1 or bits == 128:
                return text
            if operand.bits != bits:
                text += f".astype({self.name(STORAGE[bits])})"
            return text if dtype == STORAGE[bits] else f"{text}.view({self.name(dtype)})"
        if isinstance(operand, Immediate):
            return self.constant(operand, type_name)
        if isinstance(operand, Special):
            text = f"{self.name(self.compiler.special)}(w, m, {operand.name!r})"
            return f"{text}.astype({self.name(STORAGE[bits])}).view({self.name(dtype)})"
        if isinstance(operand, Symbol):
            return self.symbol(operand, bits)
        if isinstance(operand, Negated):
            return f"(~{self.value(operand.operand, type_name)})"
        raise self.fail(f"operand {operand} is not supported")

    def constant(self, operand: Immediate, type_name: str) -> str:
        bits = TYPE_BITS[type_name]
        if bits == 1:
            return self.name(np.full(32, operand.value != 0))
        number = operand.value
        if operand.float_bits and operand.float_bits != bits and type_name in ("f16", "f32", "f64"):
            source = np.array([number], f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
            number = int(source.astype(f"f{bits // 8}").view(f"u{bits // 8}")[0])
        lanes = np.full(32, number & ((1 << bits) - 1), f"u{bits // 8}")
        return self.name(lanes.view(view_dtype(type_name)))

    def symbol(self, operand: Symbol, bits: int) -> str:
        program = self.program
        if operand.name in program.shared:
            return f"{self.name(_shared_address)}(w, {program.shared[operand.name] + operand.offset}, {bits // 8})"
        if operand.name in program.local:
            address = program.local[operand.name] + operand.offset
        elif operand.name in program.params:
            address = program.params[operand.name] + operand.offset
        else:
            address = self.compiler.module.address(operand.name) + operand.offset
        return self.name(np.full(32, address & ((1 << bits) - 1), f"u{bits // 8}"))

    def address(self, operand: Operand) -> str:
        """Lane addresses of `[base + offset]`: uint32 or uint64 by the base register."""
        if not isinstance(operand, Address):
            raise self.fail("expected an address")
        base = operand.base
        if isinstance(base, Register):
            text, bits = f"R[{base.index}]", base.bits
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
        bits = TYPE_BITS[type_name]
        dtype = view_dtype(type_name)
        if operand.bits == 128 or operand.bits == 1:
            pass
        elif operand.bits != bits:
            expression = f"({expression}).astype({self.name(STORAGE[operand.bits])})"
        elif dtype != STORAGE[bits]:
            expression = f"({expression}).view({self.name(STORAGE[bits])})"
        target = f"R[{operand.index}]"
        if self.unmasked:
            self.line(f"{target} = {expression}")
        elif operand.bits == 128:
            self.line(f"{target} = {self.name(np.where)}({self.mask}[:, None], {expression}, {target})")
        else:
            self.line(f"{target} = {self.name(np.where)}({self.mask}, {expression}, {target})")

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
        register = f"R[{item.guard.index}]"
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


class Compiler:
    """Compiles the blocks of a program, on demand."""

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
        for item in block.instructions:
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
    predicate = f"{'~' if item.guard_negated else ''}R[{item.guard.index}]"
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


__all__ = ["EXIT", "STAY", "Compiler", "Emitter", "Pair", "Vector", "instruction", "view_dtype"]
