"""What the parser produces: a module of variables and functions, a function of instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

from .errors import PtxSyntaxError

# Width in bits of the register classes; `pred` is one bit per lane.
TYPE_BITS = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "pred": 1, "tf32": 32,
    "e4m3": 8, "e5m2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16, "s16x2": 32, "u16x2": 32,
    "f32x2": 64, "e4m3x4": 32, "e5m2x4": 32, "e2m1x4": 16, "e2m3x2": 16, "e3m2x2": 16, "ue8m0": 8, "ue4m3": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Register:
    """A register of the function: `index` into the warp's register file."""

    name: str
    index: int
    type: str

    @property
    def bits(self) -> int:
        return TYPE_BITS[self.type]


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal: `value` is an int, or the IEEE bits of a float literal with their width in `float_bits`."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter, function or label by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` for tensor copies."""

    base: Operand
    offset: int = 0
    coordinates: Operand | None = None


@dataclass(frozen=True)
class Pair:
    """`a|b`: a value and a predicate result."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """`!p`."""

    operand: Operand


@dataclass(frozen=True)
class Group:
    """`(a, b)`: call arguments."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """`_`: a result nobody wants."""


Operand = Union["Register", Special, Immediate, Symbol, Vector, Address, Pair, Negated, Group, Sink]


def literal(operand: Operand) -> int:
    """The value of an operand that has to be a number; raises PtxSyntaxError."""
    if not isinstance(operand, Immediate):
        raise PtxSyntaxError(f"expected a number, found {operand}")
    return operand.value


def registers_of(*operands: Operand | None) -> Iterator[Register]:
    """Registers that operands consist of."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, (Vector, Group)):
            yield from registers_of(*operand.items)
        elif isinstance(operand, Address):
            yield from registers_of(operand.base, operand.coordinates)
        elif isinstance(operand, Pair):
            yield from registers_of(operand.first, operand.second)
        elif isinstance(operand, Negated):
            yield from registers_of(operand.operand)


@dataclass(frozen=True)
class Instruction:
    """`opcode` is the dotted name split: ("ld", "global", "b32")."""

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    line: int
    text: str

    @property
    def name(self) -> str:
        return self.opcode[0]

    @property
    def type(self) -> str:
        """The last modifier, which for most instructions is the operand type."""
        return self.opcode[-1]

    def has(self, *modifiers: str) -> bool:
        return any(modifier in self.opcode for modifier in modifiers)


@dataclass(frozen=True)
class Label:
    name: str


@dataclass
class Variable:
    """A module-level, shared, local or parameter variable.

    `size` is None for `extern .shared x[]`. `initial` pairs byte offsets with bytes, or a Symbol for its address.
    """

    name: str
    space: str
    align: int
    size: int | None
    initial: list[tuple[int, bytes | Symbol]] = field(default_factory=list)


@dataclass
class Function:
    name: str
    is_entry: bool
    params: list[Variable]
    results: list[Variable]
    body: list[Instruction | Label] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    locals: dict[str, Variable] = field(default_factory=dict)
    branch_targets: dict[str, list[str]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    defined: bool = False


@dataclass
class Module:
    target: str
    variables: dict[str, Variable]
    functions: dict[str, Function]
    text: str = ""
