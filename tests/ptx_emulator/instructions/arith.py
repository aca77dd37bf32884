"""Integer and floating-point arithmetic."""

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen import Emitter, instruction, view_dtype
from ..formats import float_format
from ..ir import TYPE_BITS, Instruction

_BF16 = float_format("bf16")
_FLOAT_TYPES = {"f16", "f32", "f64", "f16x2", "bf16", "bf16x2", "f32x2"}
_TINY = np.finfo(np.float32).tiny


def _check(e: Emitter, item: Instruction, *allowed: str) -> None:
    """Refuse modifiers that the handler would silently drop."""
    for modifier in item.opcode[1:-1]:
        if modifier not in allowed:
            raise e.fail(f"modifier .{modifier} is not implemented")


def bf16_values(codes: Any) -> Any:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_codes(values: Any) -> Any:
    return _BF16.encode(values).astype(np.uint16)


def flush(values: Any) -> Any:
    """Denormal float32 to zero of the same sign."""
    small = np.abs(values) < _TINY
    return np.where(small, np.copysign(np.float32(0), values), values) if 1 in small.tobytes() else values


def saturate(values: Any) -> Any:
    """Clamp to [0, 1]; NaN becomes +0."""
    return np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))


def _relu(values: Any) -> Any:
    return np.maximum(values, values.dtype.type(0))  # NaN stays


class _Operands:
    """Expressions of the source operands, with ftz applied, and the wrapping of a result."""

    def __init__(self, e: Emitter, item: Instruction, type_name: str) -> None:
        self.e, self.item, self.type = e, item, type_name
        self.bf16 = type_name.startswith("bf16")
        self.ftz = item.has("ftz") and type_name in ("f32", "f32x2")

    def source(self, index: int) -> str:
        text = self.e.value(self.item.operands[index], self.type)
        if self.bf16:
            return f"{self.e.name(bf16_values)}({text})"
        return f"{self.e.name(flush)}({text})" if self.ftz else text

    def assign(self, expression: str) -> None:
        e = self.e
        if self.item.has("relu"):
            expression = f"{e.name(_relu)}({expression})"
        if self.bf16:
            expression = f"{e.name(bf16_codes)}({expression})"
        elif self.ftz:
            expression = f"{e.name(flush)}({expression})"
        if self.item.has("sat"):
            expression = f"{e.name(saturate)}({expression})"
        if view_dtype(self.type).itemsize * 8 != TYPE_BITS[self.type]:
            expression = f"({expression}).view({e.name(np.dtype(f'u{TYPE_BITS[self.type] // 8}'))})"
            e.assign(self.item.operands[0], expression, f"u{TYPE_BITS[self.type]}")
        else:
            e.assign(self.item.operands[0], expression, self.type)


def _saturating_add(a: Any, b: Any, sign: int) -> Any:
    total = a.astype(np.int64) + sign * b.astype(np.int64)
    return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def directed(a: Any, b: Any, c: Any, rounding: str) -> Any:
    """float32 a * b + c rounded toward zero (rz), up (rp) or down (rm)."""
    product = a.astype(np.float64) * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    nearest = total.astype(np.float32)
    difference = total - nearest
    rest = np.where(difference != 0, difference, error)  # sign of exact - nearest
    up, down = np.float32(np.inf), np.float32(-np.inf)
    if rounding == "rp":
        result = np.where(rest > 0, np.nextafter(nearest, up), nearest)
    elif rounding == "rm":
        result = np.where(rest < 0, np.nextafter(nearest, down), nearest)
    else:
        outward = (rest != 0) & ((rest > 0) != (nearest > 0))
        result = np.where(outward, np.nextafter(nearest, np.float32(0)), nearest)
    return np.where(np.isfinite(total), result, nearest).astype(np.float32)


def _emit_directed(e: Emitter, item: Instruction) -> bool:
    """add, sub, mul and fma with .rz, .rp or .rm; False for others."""
    rounding = next((m for m in item.opcode if m in ("rz", "rp", "rm")), None)
    if rounding is None:
        return False
    if item.type not in ("f32", "f32x2"):
        raise e.fail()
    _check(e, item, rounding, "ftz", "sat")
    operands = _Operands(e, item, item.type)
    lanes = 64 if item.type == "f32x2" else 32
    one, zero = e.name(np.ones(lanes, np.float32)), e.name(np.full(lanes, -0.0, np.float32))
    a, b = operands.source(1), operands.source(2)
    texts = {
        "add": (a, one, b),
        "sub": (a, one, f"(-{b})"),
        "mul": (a, b, zero),
        "fma": (a, b, operands.source(3) if len(item.operands) > 3 else zero),
    }[item.name if item.name != "mad" else "fma"]
    operands.assign(f"{e.name(directed)}({', '.join(texts)}, {rounding!r})")
    return True


@instruction("add", "sub")
def _add(e: Emitter, item: Instruction) -> None:
    sign = "+" if item.name == "add" else "-"
    if item.type == "s32" and item.has("sat"):
        a, b = (e.value(o, "s32") for o in item.operands[1:])
        e.assign(item.operands[0], f"{e.name(_saturating_add)}({a}, {b}, {sign}1)", "s32")
        return
    if item.has("cc"):
        _carry(e, item, sign)
        return
    if _emit_directed(e, item):
        return
    _check(e, item, "rn", "ftz", "sat")
    operands = _Operands(e, item, item.type)
    if item.type not in _FLOAT_TYPES and item.type not in ("s16x2", "u16x2"):
        operands = _Operands(e, item, f"u{TYPE_BITS[item.type]}")
    operands.assign(f"({operands.source(1)} {sign} {operands.source(2)})")


def _add_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    total = a + b
    out = total < a
    result = total + carry.astype(a.dtype)
    return result, out | (result < total)


def _carry(e: Emitter, item: Instruction, sign: str, carry_in: bool = False) -> None:
    """add.cc / addc / sub.cc / subc: the carry lives on the warp. a - b is a + ~b + 1, with an inverted borrow."""
    type_name = f"u{TYPE_BITS[item.type]}"
    a, b = (e.value(o, type_name) for o in item.operands[1:])
    no_carry = e.name(np.zeros(32, bool))
    if sign == "-":
        b = f"(~{b})"
        no_carry = e.name(np.ones(32, bool))
    carry = "w.carry" if carry_in else no_carry
    e.line(f"c = {e.name(_add_carry)}({a}, {b}, {carry})")
    e.assign(item.operands[0], "c[0]", type_name)
    if item.has("cc"):
        e.line("w.carry = c[1]" if e.unmasked else f"w.carry = {e.name(np.where)}({e.mask}, c[1], w.carry)")


@instruction("addc", "subc")
def _add_with_carry(e: Emitter, item: Instruction) -> None:
    _carry(e, item, "+" if item.name == "addc" else "-", carry_in=True)


def _high(a: Any, b: Any) -> Any:
    """Upper 64 bits of unsigned 64-bit products."""
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & mask, a >> low, b & mask, b >> low
    middle = a1 * b0 + (a0 * b0 >> low)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> low) + (other >> low)


def _high_signed(a: Any, b: Any) -> Any:
    unsigned_a, unsigned_b = a.view(np.uint64), b.view(np.uint64)
    high = _high(unsigned_a, unsigned_b)
    zero = np.uint64(0)
    return (high - np.where(a < 0, unsigned_b, zero) - np.where(b < 0, unsigned_a, zero)).view(np.int64)


def _product(e: Emitter, item: Instruction, type_name: str) -> tuple[str, str]:
    """The integer product of operands 1 and 2, and its type."""
    bits, kind = TYPE_BITS[type_name], type_name[0]
    if item.has("lo"):
        type_name = f"u{bits}"
    a, b = (e.value(o, type_name) for o in item.operands[1:3])
    if item.has("lo"):
        return f"({a} * {b})", type_name
    if bits == 64:
        return f"{e.name(_high_signed if kind == 's' else _high)}({a}, {b})", type_name
    wide = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 4}")
    product = f"({a}.astype({e.name(wide)}) * {b}.astype({e.name(wide)}))"
    if item.has("wide"):
        return product, f"{kind}{bits * 2}"
    narrow = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    return f"({product} >> {e.name(wide.type(bits))}).astype({e.name(narrow)})", type_name


@instruction("mul")
def _mul(e: Emitter, item: Instruction) -> None:
    if item.type in _FLOAT_TYPES:
        if _emit_directed(e, item):
            return
        _check(e, item, "rn", "ftz", "sat")
        operands = _Operands(e, item, item.type)
        operands.assign(f"({operands.source(1)} * {operands.source(2)})")
        return
    _check(e, item, "lo", "hi", "wide")
    product, type_name = _product(e, item, item.type)
    e.assign(item.operands[0], product, type_name)


@instruction("mad")
def _mad(e: Emitter, item: Instruction) -> None:
    if item.type in _FLOAT_TYPES:
        _fma(e, item)
        return
    _check(e, item, "lo", "hi", "wide")
    product, type_name = _product(e, item, item.type)
    e.assign(item.operands[0], f"({product} + {e.value(item.operands[3], type_name)})", type_name)


# Of float64's mantissa what float32 lacks, and half of its last place; arrays, which numpy takes faster than scalars.
_BELOW_FLOAT32, _HALF = np.array(0x1FFFFFFF, np.uint64), np.array(0x10000000, np.uint64)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """float32 fused multiply-add: exact product in float64, rounding corrected where float64 lands on a tie."""
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.uint64)
    ties = (bits & _BELOW_FLOAT32) == _HALF
    if 1 in ties.tobytes():
        back = total - product
        error = (product - (total - back)) + (c - back)
        away = ties & (error != 0)
        toward = (error > 0) == (total > 0)
        bits = np.where(away, np.where(toward, bits + np.uint64(1), bits - np.uint64(1)), bits)
        total = bits.view(np.float64)
    return total.astype(np.float32)


_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3


def fma64(a: Any, b: Any, c: Any) -> Any:
    return np.array([_libm.fma(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


def fma16(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(np.float64) * b + c).astype(np.float16)


def _fma_bf16(a: Any, b: Any, c: Any) -> Any:
    return a.astype(np.float64) * b + c


@instruction("fma")
def _fma(e: Emitter, item: Instruction) -> None:
    if _emit_directed(e, item):
        return
    _check(e, item, "rn", "ftz", "sat", "relu")
    operands = _Operands(e, item, item.type)
    functions = {"f32": fma32, "f32x2": fma32, "f64": fma64, "f16": fma16, "f16x2": fma16}
    function = functions.get(item.type, _fma_bf16)
    operands.assign(f"{e.name(function)}({operands.source(1)}, {operands.source(2)}, {operands.source(3)})")


def _divide(a: Any, b: Any) -> Any:
    """Integer division toward zero; by zero gives all ones, as NVIDIA hardware does."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind != "u":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, ~b.dtype.type(0), quotient)


def _remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, a, a - _divide(a, b) * b)


@instruction("div")
def _div(e: Emitter, item: Instruction) -> None:
    if item.type in _FLOAT_TYPES:
        _check(e, item, "rn", "ftz", "approx", "full")
        operands = _Operands(e, item, item.type)
        operands.assign(f"({operands.source(1)} / {operands.source(2)})")
        return
    a, b = (e.value(o, item.type) for o in item.operands[1:])
    e.assign(item.operands[0], f"{e.name(_divide)}({a}, {b})", item.type)


@instruction("rem")
def _rem(e: Emitter, item: Instruction) -> None:
    a, b = (e.value(o, item.type) for o in item.operands[1:])
    e.assign(item.operands[0], f"{e.name(_remainder)}({a}, {b})", item.type)


def _abs_bits(e: Emitter, item: Instruction, mask_operation: str) -> None:
    """abs and neg of floats act on the sign bit only."""
    bits = TYPE_BITS[item.type]
    element = 16 if item.type in ("f16", "bf16", "f16x2", "bf16x2") else bits if item.type != "f32x2" else 32
    sign = sum(1 << (i + element - 1) for i in range(0, bits, element))
    mask = sign if mask_operation == "^" else ((1 << bits) - 1) ^ sign
    source = e.value(item.operands[1], f"b{bits}")
    e.assign(item.operands[0], f"({source} {mask_operation} {e.name(np.full(32, mask, f'u{bits // 8}'))})", f"b{bits}")


@instruction("abs", "neg")
def _abs_or_neg(e: Emitter, item: Instruction) -> None:
    if item.type in _FLOAT_TYPES:
        _abs_bits(e, item, "&" if item.name == "abs" else "^")
    else:
        function = np.abs if item.name == "abs" else np.negative
        e.assign(item.operands[0], f"{e.name(function)}({e.value(item.operands[1], item.type)})", item.type)


@instruction("min", "max")
def _min_max(e: Emitter, item: Instruction) -> None:
    small = item.name == "min"
    if item.type in _FLOAT_TYPES:
        _check(e, item, "ftz", "NaN")
        operands = _Operands(e, item, item.type)
        function = (np.minimum if small else np.maximum) if item.has("NaN") else np.fmin if small else np.fmax
        text = operands.source(1)
        for index in range(2, len(item.operands)):
            text = f"{e.name(function)}({text}, {operands.source(index)})"
        operands.assign(text)
        return
    _check(e, item, "relu")
    operands = _Operands(e, item, item.type)
    function = np.minimum if small else np.maximum
    operands.assign(f"{e.name(function)}({operands.source(1)}, {operands.source(2)})")


def _in_double(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hardware's approximations are replaced by correctly rounded float32 results."""

    def apply(x: Any) -> Any:
        return function(x.astype(np.float64)).astype(x.dtype)

    return apply


_UNARY: dict[str, Callable[[Any], Any]] = {
    "rcp": _in_double(lambda x: 1.0 / x),
    "sqrt": np.sqrt,
    "rsqrt": _in_double(lambda x: 1.0 / np.sqrt(x)),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "lg2": _in_double(np.log2),
    "ex2": _in_double(np.exp2),
    "tanh": _in_double(np.tanh),
}


@instruction(*_UNARY)
def _unary(e: Emitter, item: Instruction) -> None:
    _check(e, item, "rn", "approx", "ftz")
    operands = _Operands(e, item, item.type)
    operands.assign(f"{e.name(_UNARY[item.name])}({operands.source(1)})")


@instruction("copysign")
def _copysign(e: Emitter, item: Instruction) -> None:
    sign, magnitude = (e.value(o, item.type) for o in item.operands[1:])
    e.assign(item.operands[0], f"{e.name(np.copysign)}({magnitude}, {sign})", item.type)


def _dot(a: Any, b: Any, c: Any, signed_a: bool, signed_b: bool, count: int, first: int) -> Any:
    """c + the products of the `count` parts of a with bytes of b, from byte `first` on."""
    left = a.view(f"{'i' if signed_a else 'u'}{4 // count}").reshape(32, count).astype(np.int64)
    right = b.view(np.int8 if signed_b else np.uint8).reshape(32, 4)[:, first : first + count].astype(np.int64)
    return (c.astype(np.int64) + (left * right).sum(axis=1)).astype(np.uint32)


@instruction("dp4a", "dp2a")
def _dot_product(e: Emitter, item: Instruction) -> None:
    a, b, c = (e.value(o, "u32") for o in item.operands[1:])
    signed_a, signed_b = (name == "s32" for name in item.opcode[-2:])
    count, first = (4, 0) if item.name == "dp4a" else (2, {"lo": 0, "hi": 2}[item.opcode[1]])
    e.assign(item.operands[0], f"{e.name(_dot)}({a}, {b}, {c}, {signed_a}, {signed_b}, {count}, {first})", "u32")
