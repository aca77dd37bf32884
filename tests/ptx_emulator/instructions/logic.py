"""Bits, comparisons, selection, moves."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen import Emitter, instruction, view_dtype
from ..ir import TYPE_BITS, Immediate, Instruction, Operand, Pair, Vector
from .arith import bf16_values, flush


@instruction("and", "or", "xor")
def _bitwise(e: Emitter, item: Instruction) -> None:
    sign = {"and": "&", "or": "|", "xor": "^"}[item.name]
    a, b = (e.value(o, item.type) for o in item.operands[1:])
    e.assign(item.operands[0], f"({a} {sign} {b})", item.type)


@instruction("not")
def _not(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], f"(~{e.value(item.operands[1], item.type)})", item.type)


@instruction("shl", "shr")
def _shift(e: Emitter, item: Instruction) -> None:
    """Amounts of the width or more shift everything out, as numpy's shifts do."""
    kind, bits = item.type[0], TYPE_BITS[item.type]
    type_name = item.type if item.name == "shr" and kind == "s" else f"u{bits}"
    value = e.value(item.operands[1], type_name)
    amount = item.operands[2]
    if isinstance(amount, Immediate):
        clamped = e.constant(Immediate(min(amount.value & 0xFFFFFFFF, bits)), type_name)
    else:
        shifts = e.value(amount, "u32")
        limit = e.constant(Immediate(bits), "u32")
        clamped = f"{e.name(np.minimum)}({shifts}, {limit}).astype({e.name(view_dtype(type_name))})"
    sign = "<<" if item.name == "shl" else ">>"
    e.assign(item.operands[0], f"({value} {sign} {clamped})", type_name)


def _funnel(a: Any, b: Any, c: Any, left: bool, wrap: bool) -> Any:
    amount = (c & np.uint32(31)) if wrap else np.minimum(c, np.uint32(32))
    joined = (b.astype(np.uint64) << np.uint64(32)) | a
    if left:
        return (joined >> (np.uint64(32) - amount)).astype(np.uint32)
    return (joined >> amount.astype(np.uint64)).astype(np.uint32)


@instruction("shf")
def _shf(e: Emitter, item: Instruction) -> None:
    a, b, c = (e.value(o, "u32") for o in item.operands[1:])
    e.assign(item.operands[0], f"{e.name(_funnel)}({a}, {b}, {c}, {item.has('l')}, {item.has('wrap')})", "u32")


@instruction("lop3")
def _lop3(e: Emitter, item: Instruction) -> None:
    destination = item.operands[0]
    if len(item.operands) != 5 or isinstance(destination, Pair) or not isinstance(item.operands[4], Immediate):
        raise e.fail("lop3 with a predicate result")
    names = [e.temporary() for _ in range(3)]
    for name, operand in zip(names, item.operands[1:4], strict=True):
        e.line(f"{name} = {e.value(operand, 'b32')}")
    a, b, c = names
    table = item.operands[4].value
    terms = []
    for row in range(8):
        if table >> row & 1:
            bits = [(a, row & 4), (b, row & 2), (c, row & 1)]
            terms.append("(" + " & ".join(n if on else f"~{n}" for n, on in bits) + ")")
    expression = " | ".join(terms) or e.constant(Immediate(0), "b32")
    e.assign(destination, f"({expression})", "b32")


_PRMT_MODES: dict[str, Callable[[int], list[int]]] = {
    "f4e": lambda n: [n, n + 1, n + 2, n + 3],
    "b4e": lambda n: [n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7],
    "rc8": lambda n: [n] * 4,
    "ecl": lambda n: [max(n, i) for i in range(4)],
    "ecr": lambda n: [min(n, i) for i in range(4)],
    "rc16": lambda n: [(n & 1) * 2, (n & 1) * 2 + 1] * 2,
}


_POOL = 8 * np.arange(32)[:, None]  # where a lane's eight bytes begin


def _permute(a: Any, b: Any, selectors: Any) -> Any:
    nibbles = (selectors[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
    chosen = _select(a, b, _POOL + (nibbles & np.uint32(7)).astype(np.int64))
    sign = (nibbles & np.uint32(8)) != 0
    bytes_of = chosen.view(np.uint8).reshape(32, 4)
    signs = np.where(bytes_of >= 128, np.uint8(255), np.uint8(0))
    return np.ascontiguousarray(np.where(sign, signs, bytes_of)).view(np.uint32).reshape(32)


def _select(a: Any, b: Any, places: Any) -> Any:
    """Four of the eight bytes that each lane has in a and b."""
    pool = np.empty((32, 2), np.uint32)
    pool[:, 0] = a
    pool[:, 1] = b
    return pool.view(np.uint8).take(places).view(np.uint32).reshape(32)


def _permute_mode(a: Any, b: Any, c: Any, mode: str) -> Any:
    table = np.array([sum((i & 7) << 4 * k for k, i in enumerate(_PRMT_MODES[mode](n))) for n in range(4)], np.uint32)
    return _permute(a, b, table[c & np.uint32(3)])


@instruction("prmt")
def _prmt(e: Emitter, item: Instruction) -> None:
    a, b, c = (e.value(o, "u32") for o in item.operands[1:])
    selector = e.known(item.operands[3])
    if item.opcode == ("prmt", "b32") and selector is not None and not selector & 0x8888:
        places = e.name(_POOL + [selector >> shift & 7 for shift in (0, 4, 8, 12)])
        e.assign(item.operands[0], f"{e.name(_select)}({a}, {b}, {places})", "u32")
    elif item.opcode == ("prmt", "b32"):
        e.assign(item.operands[0], f"{e.name(_permute)}({a}, {b}, {c})", "u32")
    else:
        e.assign(item.operands[0], f"{e.name(_permute_mode)}({a}, {b}, {c}, {item.type!r})", "u32")


def _extract(value: Any, start: Any, length: Any, signed: bool) -> Any:
    bits = value.dtype.itemsize * 8
    unsigned = np.dtype(f"u{bits // 8}")
    raw = value.view(unsigned)
    first = (start & np.uint32(255)).astype(np.int64)
    count = (length & np.uint32(255)).astype(np.int64)
    full = count >= bits
    mask = np.where(full, ~unsigned.type(0), (unsigned.type(1) << count.astype(unsigned)) - unsigned.type(1))
    field = np.where(first < bits, raw >> np.minimum(first, bits).astype(unsigned), unsigned.type(0)) & mask
    if not signed:
        return field
    top = np.minimum(first + count - 1, bits - 1)
    negative = (raw >> np.maximum(top, 0).astype(unsigned) & unsigned.type(1)) != 0
    available = np.clip(bits - first, 0, bits)
    width = np.minimum(count, available)
    fill = np.where(width >= bits, unsigned.type(0), ~unsigned.type(0) << np.minimum(width, bits - 1).astype(unsigned))
    return np.where(negative & (count > 0), field | fill, field).view(value.dtype)


@instruction("bfe")
def _bfe(e: Emitter, item: Instruction) -> None:
    value = e.value(item.operands[1], item.type)
    start, length = (e.value(o, "u32") for o in item.operands[2:])
    e.assign(item.operands[0], f"{e.name(_extract)}({value}, {start}, {length}, {item.type[0] == 's'})", item.type)


def _insert(field: Any, base: Any, start: Any, length: Any) -> Any:
    bits = field.dtype.itemsize * 8
    kind = field.dtype.type
    first = (start & np.uint32(255)).astype(np.uint64)
    count = (length & np.uint32(255)).astype(np.uint64)
    ones = np.where(count >= bits, ~kind(0), (kind(1) << np.minimum(count, bits - 1).astype(kind)) - kind(1))
    shift = np.minimum(first, bits).astype(kind)
    mask = np.where(first >= bits, kind(0), ones << shift)
    return (base & ~mask) | ((field << shift) & mask)


@instruction("bfi")
def _bfi(e: Emitter, item: Instruction) -> None:
    field, base = (e.value(o, f"u{TYPE_BITS[item.type]}") for o in item.operands[1:3])
    start, length = (e.value(o, "u32") for o in item.operands[3:])
    e.assign(item.operands[0], f"{e.name(_insert)}({field}, {base}, {start}, {length})", f"u{TYPE_BITS[item.type]}")


def _bit_lengths(values: Any) -> Any:
    return np.array([v.bit_length() for v in values.tolist()], np.uint32)


def _leading_zeros(values: Any) -> Any:
    return np.uint32(values.dtype.itemsize * 8) - _bit_lengths(values)


def _highest(values: Any, shift: bool) -> Any:
    bits = values.dtype.itemsize * 8
    if values.dtype.kind == "i":
        values = np.where(values < 0, ~values, values).view(f"u{bits // 8}")
    position = _bit_lengths(values) - np.uint32(1)
    return np.where(position == 0xFFFFFFFF, position, np.uint32(bits - 1) - position) if shift else position


def _reverse(values: Any) -> Any:
    width = values.dtype.itemsize
    bits = np.unpackbits(values.view(np.uint8).reshape(-1, width), axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(values.dtype).reshape(-1)


def _population(values: Any) -> Any:
    return np.bitwise_count(values).astype(np.uint32)


@instruction("clz", "popc")
def _count_bits(e: Emitter, item: Instruction) -> None:
    function = {"clz": _leading_zeros, "popc": _population}[item.name]
    value = e.value(item.operands[1], f"u{TYPE_BITS[item.type]}")
    e.assign(item.operands[0], f"{e.name(function)}({value})", "u32")


@instruction("bfind")
def _bfind(e: Emitter, item: Instruction) -> None:
    e.assign(
        item.operands[0], f"{e.name(_highest)}({e.value(item.operands[1], item.type)}, {item.has('shiftamt')})", "u32"
    )


@instruction("brev")
def _brev(e: Emitter, item: Instruction) -> None:
    type_name = f"u{TYPE_BITS[item.type]}"
    e.assign(item.operands[0], f"{e.name(_reverse)}({e.value(item.operands[1], type_name)})", type_name)


# -- comparison and selection ---------------------------------------------------------------------------------------

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparison(e: Emitter, item: Instruction, type_name: str) -> str:
    operator = next(m for m in item.opcode[1:] if m in _COMPARE or m in _UNSIGNED_COMPARE or m in _FLOAT_ONLY)
    operands = item.operands[1:3]
    if type_name[0] == "s" and operator in ("eq", "ne"):
        type_name = f"u{type_name[1:]}"
    if type_name in ("bf16", "bf16x2"):
        a, b = (f"{e.name(bf16_values)}({e.value(o, type_name)})" for o in operands)
    else:
        a, b = (e.value(o, type_name) for o in operands)
    if item.has("ftz"):
        a, b = f"{e.name(flush)}({a})", f"{e.name(flush)}({b})"
    is_float = type_name.startswith(("f", "bf"))
    if is_float and operator in ("num", "nan"):
        either = f"({e.name(np.isnan)}({a}) | {e.name(np.isnan)}({b}))"
        return either if operator == "nan" else f"(~{either})"
    if is_float and operator == "ne":
        return f"(({a} < {b}) | ({a} > {b}))"
    if is_float and operator.endswith("u"):
        text = f"({a} {_COMPARE[operator[:-1]]} {b})"
        return f"({text} | {e.name(np.isnan)}({a}) | {e.name(np.isnan)}({b}))"
    return f"({a} {_COMPARE[_UNSIGNED_COMPARE.get(operator, operator)]} {b})"


_FLOAT_ONLY = {"num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu"}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


def _combine(e: Emitter, item: Instruction, text: str, last: Operand, negate: bool) -> str:
    text = f"(~{text})" if negate else text
    operator = next((m for m in item.opcode[1:] if m in _BOOLEAN), None)
    return text if operator is None else f"({text} {_BOOLEAN[operator]} {e.value(last, 'pred')})"


@instruction("setp")
def _setp(e: Emitter, item: Instruction) -> None:
    destination = item.operands[0]
    text = _comparison(e, item, item.type)
    if item.type in ("f16x2", "bf16x2"):
        if not isinstance(destination, Pair):
            raise e.fail("packed setp needs two predicates")
        e.line(f"t = {text}")
        e.assign(destination.first, "t[0::2]", "pred")
        e.assign(destination.second, "t[1::2]", "pred")
        return
    if isinstance(destination, Pair):
        e.line(f"t = {text}")
        second = _combine(e, item, "t", item.operands[-1], True)
        e.line(f"t2 = {second}")
        e.assign(destination.first, _combine(e, item, "t", item.operands[-1], False), "pred")
        e.assign(destination.second, "t2", "pred")
    else:
        e.assign(destination, _combine(e, item, text, item.operands[-1], False), "pred")


@instruction("set")
def _set(e: Emitter, item: Instruction) -> None:
    result, source = item.opcode[-2], item.opcode[-1]
    if source in ("f16x2", "bf16x2"):
        raise e.fail("packed set")
    text = _combine(e, item, _comparison(e, item, source), item.operands[-1], False)
    if result == "f32":
        e.assign(item.operands[0], f"{text}.astype({e.name(np.dtype(np.float32))})", "f32")
    else:
        e.assign(item.operands[0], f"(-{text}.astype({e.name(np.dtype(np.int32))}))", "s32")


@instruction("selp")
def _selp(e: Emitter, item: Instruction) -> None:
    a, b = (e.value(o, f"b{TYPE_BITS[item.type]}") for o in item.operands[1:3])
    condition = e.value(item.operands[3], "pred")
    e.assign(item.operands[0], f"{e.name(np.where)}({condition}, {a}, {b})", f"b{TYPE_BITS[item.type]}")


def _test(values: Any, what: str) -> Any:
    tiny = np.finfo(values.dtype).tiny
    normal = np.isfinite(values) & (np.abs(values) >= tiny)
    return {
        "finite": np.isfinite(values),
        "infinite": np.isinf(values),
        "number": ~np.isnan(values),
        "notanumber": np.isnan(values),
        "normal": normal,
        "subnormal": np.isfinite(values) & (np.abs(values) < tiny) & (values != 0),
    }[what]


@instruction("testp")
def _testp(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], f"{e.name(_test)}({e.value(item.operands[1], item.type)}, {item.opcode[1]!r})", "pred")


# -- moves ----------------------------------------------------------------------------------------------------------


def _pack(parts: tuple[Any, ...], width: int) -> Any:
    joined = np.empty((32, len(parts)), parts[0].dtype)
    for index, part in enumerate(parts):
        joined[:, index] = part
    return joined.view(f"u{width}")[:, 0]


def _pack_wide(low: Any, high: Any) -> Any:
    return np.stack([low, high], axis=1)


def _unpack(value: Any, count: int) -> list[Any]:
    width = value.dtype.itemsize * (value.shape[1] if value.ndim == 2 else 1) // count
    parts = value.reshape(-1).view(f"u{width}")
    return [parts[i::count].copy() for i in range(count)]


@instruction("mov")
def _mov(e: Emitter, item: Instruction) -> None:
    destination, source = item.operands
    bits = TYPE_BITS[item.type]
    if isinstance(source, Vector):
        part = bits // len(source.items)
        values = [e.value(i, f"b{part}") for i in source.items]
        if bits == 128:
            if part != 64:
                values = [f"{e.name(_pack)}({e.bound(values[i : i + 2])}, 8)" for i in (0, 2)]
            e.assign(destination, f"{e.name(_pack_wide)}({values[0]}, {values[1]})", "b128")
        else:
            e.assign(destination, f"{e.name(_pack)}({e.bound(values)}, {bits // 8})", f"b{bits}")
    elif isinstance(destination, Vector):
        count = len(destination.items)
        e.merge_call(_unpack, f"{e.value(source, f'b{bits}')}, {count}", list(destination.items), f"b{bits // count}")
    else:
        kind = "pred" if bits == 1 else f"b{bits}"
        e.assign(destination, e.value(source, kind), kind)
