"""`cvt` among integers, floats and the narrow packed formats."""

from typing import Any

import numpy as np

from ..codegen import Emitter, instruction, view_dtype
from ..formats import decode_packed, encode_packed, float_format
from ..ir import TYPE_BITS, Instruction
from .arith import bf16_codes, bf16_values, flush, saturate

_BF16 = float_format("bf16")
_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT_ROUNDING = ("rn", "rna", "rz", "rp", "rm")
_PLAIN_FLOATS = ("f16", "f32", "f64", "bf16")
_MODIFIERS = {*_INTEGER_ROUNDING, *_FLOAT_ROUNDING, "ftz", "sat", "satfinite", "relu"}


def bf16x2_codes(high: Any, low: Any) -> Any:
    """Two float32 to bf16x2, round to nearest even: `cvt.rn.bf16x2.f32`."""
    return _BF16.encode(low) | _BF16.encode(high) << np.uint32(16)


def _to_integer(values: Any, function: Any, dtype: Any) -> Any:
    """Rounded, clamped to the destination's range; NaN becomes 0 (as for every width below 64 on hardware)."""
    info = np.iinfo(dtype)
    rounded = function(values.astype(np.float64))
    clipped = np.clip(np.where(np.isnan(rounded), 0.0, rounded), float(info.min), float(info.max))
    if info.bits < 64:
        return clipped.astype(np.int64).astype(dtype)
    top = rounded >= float(info.max)
    return np.where(top, dtype.type(info.max), np.where(top, 0.0, clipped).astype(dtype))


def _clamp(values: Any, dtype: Any) -> Any:
    info = np.iinfo(dtype)
    if values.dtype == np.uint64:
        return np.minimum(values, np.uint64(info.max)).astype(dtype)
    if info.bits == 64 and info.min == 0:
        return np.maximum(values, 0).astype(dtype)
    return np.clip(values.astype(np.int64), int(info.min), min(int(info.max), (1 << 63) - 1)).astype(dtype)


def _to_float(values: Any, rounding: str, dtype: Any) -> Any:
    """Directed rounding by stepping from the nearest value."""
    nearest = values.astype(dtype)
    if rounding == "rn":
        return nearest
    exact = values.astype(np.longdouble)
    wide = nearest.astype(np.longdouble)
    up, down = dtype.type(np.inf), dtype.type(-np.inf)
    if rounding == "rz":
        return np.where(np.abs(wide) > np.abs(exact), np.nextafter(nearest, dtype.type(0)), nearest)
    if rounding == "rp":
        return np.where(wide < exact, np.nextafter(nearest, up), nearest)
    return np.where(wide > exact, np.nextafter(nearest, down), nearest)


def _round_to_integral(values: Any, function: Any) -> Any:
    return function(values).astype(values.dtype)


def _encode(type_name: str, elements: list[Any], rounding: str, satfinite: bool, relu: bool) -> Any:
    bits = TYPE_BITS[type_name]
    return encode_packed(type_name, elements, rounding, satfinite, relu).astype(f"u{max(bits, 8) // 8}")


def _decode_to(result: str, source: str, codes: Any, relu: bool) -> Any:
    """A packed narrow type to f16x2 or bf16x2."""
    elements = decode_packed(source, codes)
    return encode_packed(result, elements[::-1], "rn", False, relu).astype(f"u{TYPE_BITS[result] // 8}")


@instruction("cvt")
def _cvt(e: Emitter, item: Instruction) -> None:
    if item.opcode[1] == "pack":
        raise e.fail()
    result, source = item.opcode[-2], item.opcode[-1]
    modifiers = item.opcode[1:-2]
    if result not in TYPE_BITS or source not in TYPE_BITS or set(modifiers) - _MODIFIERS:
        raise e.fail()
    rounding = next((m for m in modifiers if m in _FLOAT_ROUNDING), "rn")
    integral = next((_INTEGER_ROUNDING[m] for m in modifiers if m in _INTEGER_ROUNDING), None)
    narrow = (result not in _PLAIN_FLOATS and result[0] not in "us") or result.startswith("ue")
    if narrow and source in ("f32", "f16", "bf16"):
        elements = [e.value(o, source) for o in item.operands[1:]]
        if source == "bf16":
            elements = [f"{e.name(bf16_values)}({text})" for text in elements]
        if item.opcode == ("cvt", "rn", "bf16x2", "f32"):
            e.assign(item.operands[0], f"{e.name(bf16x2_codes)}({elements[0]}, {elements[1]})", "b32")
            return
        flags = f"{rounding!r}, {'satfinite' in modifiers}, {'relu' in modifiers}"
        expression = f"{e.name(_encode)}({result!r}, [{', '.join(elements)}], {flags})"
        e.assign(item.operands[0], expression, f"b{TYPE_BITS[result]}")
        return
    if narrow:
        if source in ("f16x2", "bf16x2"):
            parts = e.temporary()
            e.line(f"{parts} = {e.name(decode_packed)}({source!r}, {e.value(item.operands[1], 'b32')})")
            flags = f"{rounding!r}, {'satfinite' in modifiers}, {'relu' in modifiers}"
            expression = f"{e.name(_encode)}({result!r}, {parts}[::-1], {flags})"
        else:
            codes = e.value(item.operands[1], f"b{TYPE_BITS[source]}")
            expression = f"{e.name(_decode_to)}({result!r}, {source!r}, {codes}, {'relu' in modifiers})"
        e.assign(item.operands[0], expression, f"b{TYPE_BITS[result]}")
        return
    value = e.value(item.operands[1], source)
    if source == "bf16":
        value = f"{e.name(bf16_values)}({value})"
    if "ftz" in modifiers and source == "f32":
        value = f"{e.name(flush)}({value})"
    from_float = source in _PLAIN_FLOATS
    dtype = np.dtype(np.float32) if result == "bf16" else view_dtype(result)
    target = e.name(dtype)
    if result in _PLAIN_FLOATS:
        if integral is not None:
            value = f"{e.name(_round_to_integral)}({value}, {e.name(integral)})"
        if result != "bf16" or not from_float:
            same = from_float and result == source
            value = value if same else f"{e.name(_to_float)}({value}, {rounding!r}, {target})"
        elif rounding != "rn":
            raise e.fail()
        if "ftz" in modifiers and result == "f32":
            value = f"{e.name(flush)}({value})"
        if "sat" in modifiers:
            value = f"{e.name(saturate)}({value})"
        if "relu" in modifiers:
            raise e.fail()
        e.assign(item.operands[0], f"{e.name(bf16_codes)}({value})" if result == "bf16" else value, result)
    elif from_float:
        if integral is None:
            raise e.fail("float to integer without rounding")
        e.assign(item.operands[0], f"{e.name(_to_integer)}({value}, {e.name(integral)}, {target})", result)
    elif "sat" in modifiers:
        e.assign(item.operands[0], f"{e.name(_clamp)}({value}, {target})", result)
    else:
        e.assign(item.operands[0], f"{value}.astype({target})", result)
