"""Loads, stores, atomics, address conversion, non-bulk asynchronous copies."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..barriers import Landing
from ..codegen import STAY, Emitter, instruction, view_dtype
from ..errors import MemoryFault
from ..formats import float_format
from ..ir import TYPE_BITS, Address, Instruction, Operand, Register, Sink, Symbol, Vector, literal
from ..machine import Fragment, Warp
from ..memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, SharedMemory
from .sync import give_way

_LANES = np.arange(32, dtype=np.uint64)
_SYNCHRONISING = ("volatile", "acquire", "relaxed", "mmio")
_SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "const",
    "param::entry",
    "param::func",
)
_SHARED = ("shared", "shared::cta", "shared::cluster")
_BF16 = float_format("bf16")


def _space(item: Instruction) -> str:
    for modifier in item.opcode[1:]:
        if modifier in _SPACES:
            return "shared" if modifier in _SHARED else modifier.split("::")[0]
    return "generic"


def shared_load(warp: Warp, addresses: Any, width: int, count: int, synchronises: bool = False) -> Any:
    """Loads of active lanes from shared memory of this CTA or of the cluster; those that synchronise may race."""
    cta = warp.cta
    if cta.cluster.size == 1 or cta.shared.index(addresses, 1) is not None:
        return cta.shared.load_by(warp.id, warp.clock, synchronises, addresses, width, count)
    ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
    out = np.empty((len(addresses), count) if count > 1 else len(addresses), f"u{width}")
    for rank in np.unique(ranks).tolist():
        lanes = ranks == rank
        shared = cta.peer(rank << RANK_SHIFT).shared
        out[lanes] = shared.load_by(warp.id, warp.clock, synchronises, addresses[lanes], width, count)
    return out


def shared_store(
    warp: Warp, addresses: Any, values: Any, width: int, count: int, synchronises: bool = False, clock: Any = None
) -> None:
    """Stores of active lanes; those that synchronise may race. clock: of cp.async, what the warp had seen then."""
    cta = warp.cta
    by_copy, clock = clock is not None, warp.clock if clock is None else clock
    if cta.cluster.size == 1 or cta.shared.index(addresses, 1) is not None:
        cta.shared.store_by(warp.id, clock, synchronises, addresses, values, width, count, by_copy)
        return
    ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
    for rank in np.unique(ranks).tolist():
        lanes = ranks == rank
        shared: SharedMemory = cta.peer(rank << RANK_SHIFT).shared
        shared.store_by(warp.id, clock, synchronises, addresses[lanes], values[lanes], width, count, by_copy)


def resolve(addresses: Any) -> tuple[str, Any]:
    """The space of generic addresses (all the same), and the addresses within it."""
    first = int(addresses[0])
    if first >= LOCAL_WINDOW:
        return "local", addresses - np.uint64(LOCAL_WINDOW)
    if first >= SHARED_WINDOW:
        return "shared", addresses - np.uint64(SHARED_WINDOW)
    return "global", addresses


def _same_space(addresses: Any) -> bool:
    kinds = addresses >> np.uint64(56)
    return bool((kinds == kinds[0]).all())


def _load_active(warp: Warp, space: str, addresses: Any, lanes: Any, width: int, count: int, synchronises: bool) -> Any:
    launch = warp.cta.launch
    if space == "generic":
        addresses = addresses.astype(np.uint64)
        if not _same_space(addresses):
            kinds = addresses >> np.uint64(56)
            out = np.empty((len(addresses), count) if count > 1 else len(addresses), f"u{width}")
            for kind in np.unique(kinds):
                part = kinds == kind
                out[part] = _load_active(warp, "generic", addresses[part], lanes[part], width, count, synchronises)
            return out
        space, addresses = resolve(addresses)
    launch.counters.bytes_read[space] += len(addresses) * width * count
    if space == "shared":
        return shared_load(warp, addresses, width, count, synchronises)
    if space == "local":
        return warp.local.load(addresses, lanes, width, count)
    if launch.overlaps:
        launch.overlap.access_by(synchronises or bool(warp.clock[-1]))
    return launch.device.memory.load(addresses, width, count)


def load(warp: Warp, space: str, addresses: Any, active: Any, width: int, count: int, synchronises: bool) -> Any:
    """All 32 lanes of a load; [32] or [32, count] unsigned of `width` bytes; inactive lanes are zero."""
    if active is None:
        return _load_active(warp, space, addresses, _LANES, width, count, synchronises)
    out = np.zeros((32, count) if count > 1 else 32, f"u{width}")
    out[active] = _load_active(warp, space, addresses[active], _LANES[active], width, count, synchronises)
    return out


def _store_active(
    warp: Warp, space: str, addresses: Any, lanes: Any, values: Any, width: int, count: int, synchronises: bool = False
) -> None:
    launch = warp.cta.launch
    if space == "generic":
        addresses = addresses.astype(np.uint64)
        if not _same_space(addresses):
            kinds = addresses >> np.uint64(56)
            for kind in np.unique(kinds):
                part = kinds == kind
                _store_active(warp, "generic", addresses[part], lanes[part], values[part], width, count, synchronises)
            return
        space, addresses = resolve(addresses)
    launch.counters.bytes_written[space] += len(addresses) * width * count
    launch.activity += 1
    if space == "shared":
        shared_store(warp, addresses, values, width, count, synchronises)
    elif space == "local":
        warp.local.store(addresses, lanes, values, width, count)
    elif space == "global":
        if launch.overlaps:
            launch.overlap.access_by(synchronises or bool(warp.clock[-1]))
        launch.device.memory.store(addresses, values, width, count)
    else:
        raise MemoryFault(f"store to .{space} space")


def store(
    warp: Warp, space: str, addresses: Any, active: Any, values: Any, width: int, count: int, synchronises: bool = False
) -> None:
    if count > 1:
        values = np.array(values).T
    if active is None:
        _store_active(warp, space, addresses, _LANES, values, width, count, synchronises)
    else:
        _store_active(warp, space, addresses[active], _LANES[active], values[active], width, count, synchronises)


def store_in_turns(
    warp: Warp, fragment: Fragment, address: Any, active: Any, values: Any, width: int, count: int
) -> bool:
    """A store to global memory; True while words of it have yet to land. Each word is written in one piece."""
    landing, fragment.wait = fragment.wait, None
    first = warp.cta.launch.disorder.first_to_land(count) if landing is None else None
    if landing is None and first is None:
        store(warp, "global", address, active, values, width, count)
        return False
    words = first if first is not None else ~landing.words  # type: ignore[union-attr]
    for index, data in enumerate(values if count > 1 else (values,)):
        lanes = words[:, index] if active is None else words[:, index] & active
        if lanes.any():
            place = address[lanes] + address.dtype.type(index * width)
            _store_active(warp, "global", place, _LANES[lanes], data[lanes], width, 1)
    if first is not None:
        fragment.wait = Landing(first)
    return first is not None


def active_name(e: Emitter) -> str:
    """The active lanes as runtime functions take them: None for all."""
    return "None" if e.unmasked else e.mask


def _columns(values: Any) -> Any:
    return values.T.copy()


def _param_address(e: Emitter, operand: Operand) -> str | None:
    """Kernel parameters: an address in the launch's parameter buffer; None for a function's own parameter variables."""
    if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in e.program.local:
        return None
    return f"({e.address(operand)} + {e.name(np.uint64)}(w.cta.launch.params.base))"


def _split_space(e: Emitter, item: Instruction, operand: Operand) -> tuple[str, str]:
    space = _space(item)
    if space == "param":
        address = _param_address(e, operand)
        return ("local", e.address(operand)) if address is None else ("global", address)
    return ("global" if space == "const" else space), e.address(operand)


def _parameter(e: Emitter, item: Instruction) -> int | None:
    """Where in the parameter buffer an instruction loads from, where that is one place for all."""
    source = item.operands[1]
    if _space(item) != "param" or not isinstance(source, Address) or _param_address(e, source) is None:
        return None
    base = e.program.params[source.base.name] if isinstance(source.base, Symbol) else e.known(source.base)
    return None if base is None else base + source.offset


@instruction("ld", "ldu")
def _ld(e: Emitter, item: Instruction) -> None:
    destination, source = item.operands[0], item.operands[1]
    place = _parameter(e, item)
    if place is not None and item.type != "b128":
        items = list(destination.items) if isinstance(destination, Vector) else [destination]
        for index, register in enumerate(items):
            dtype = view_dtype(item.type)
            text = f"w.cta.launch.parameter({place + index * dtype.itemsize}, {e.name(dtype)})"
            e.assign(register, text, item.type)
        return
    if item.has("acquire", "relaxed"):
        e.line(f"if {e.name(give_way)}(f, 'polls'): return {STAY}")
    space, address = _split_space(e, item, source)
    bits = TYPE_BITS[item.type]
    synchronises = item.has(*_SYNCHRONISING)
    if bits == 128:
        text = f"{e.name(load)}(w, {space!r}, {address}, {active_name(e)}, 8, 2, {synchronises})"
        e.assign(destination, text, "b128")
        return
    items = list(destination.items) if isinstance(destination, Vector) else [destination]
    text = f"{e.name(load)}(w, {space!r}, {address}, {active_name(e)}, {bits // 8}, {len(items)}, {synchronises})"
    if len(items) == 1:
        e.assign(items[0], f"{text}.view({e.name(view_dtype(item.type))})", item.type)
    else:
        name = e.temporary()
        e.line(f"{name} = {e.name(_columns)}({text}).view({e.name(view_dtype(item.type))})")
        for index, register in enumerate(items):
            e.assign(register, f"{name}[{index}]", item.type)


def _halves(value: Any) -> list[Any]:
    return [np.ascontiguousarray(value[:, 0]), np.ascontiguousarray(value[:, 1])]


@instruction("st")
def _st(e: Emitter, item: Instruction) -> None:
    space, address = _split_space(e, item, item.operands[0])
    bits = TYPE_BITS[item.type]
    source = item.operands[1]
    arguments = f"w, {space!r}, {address}, {active_name(e)}"
    if bits == 128:
        e.line(f"{e.name(store)}({arguments}, {e.name(_halves)}({e.value(source, 'b128')}), 8, 2)")
        return
    items = list(source.items) if isinstance(source, Vector) else [source]
    values = [e.value(i, f"b{bits}") for i in items]
    data = values[0] if len(values) == 1 else e.bound(values)
    if item.has("global"):
        arguments = f"w, f, {address}, {active_name(e)}, {data}, {bits // 8}, {len(values)}"
        e.line(f"if {e.name(store_in_turns)}({arguments}): return {STAY}")
        return
    synchronises = item.has(*_SYNCHRONISING, "release")
    e.line(f"{e.name(store)}({arguments}, {data}, {bits // 8}, {len(values)}, {synchronises})")


# -- atomics --------------------------------------------------------------------------------------------------------

_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "inc": lambda a, b: np.where(a >= b, np.zeros_like(a), a + np.ones_like(a)),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - np.ones_like(a)),
}


def _bf16_add(a: Any, b: Any) -> Any:
    return _BF16.encode(_BF16.decode(a) + _BF16.decode(b)).astype(np.uint16)


def atomic(
    warp: Warp,
    space: str,
    addresses: Any,
    active: Any,
    operation: Any,
    dtype: Any,
    width: int,
    count: int,
    *values: Any,
) -> Any:
    """Lane after lane: read, combine as `dtype`, write. Values and results are unsigned, [32] or [32, count]."""
    out = np.zeros((32, count) if count > 1 else 32, f"u{width}")
    lanes = range(32) if active is None else np.flatnonzero(active).tolist()
    for lane in lanes:
        where, index = addresses[lane : lane + 1], _LANES[lane : lane + 1]
        old = _load_active(warp, space, where, index, width, count, True)
        operands = [v[lane : lane + 1].reshape(-1).view(dtype) for v in values]
        new = operation(old.reshape(-1).view(dtype), *operands)
        new = np.ascontiguousarray(new.astype(dtype)).view(old.dtype).reshape(old.shape)
        _store_active(warp, space, where, index, new, width, count, True)
        out[lane] = old[0]
    return out


def _compare_and_swap(old: Any, compare: Any, value: Any) -> Any:
    return np.where(old == compare, value, old)


@instruction("atom", "red")
def _atom(e: Emitter, item: Instruction) -> None:
    returns = item.name == "atom"
    operands = list(item.operands) if returns else [Sink(), *item.operands]
    space, address = _split_space(e, item, operands[1])
    operation = next((m for m in item.opcode[1:] if m in _ATOMIC or m == "cas"), None)
    if operation is None:
        raise e.fail()
    bits = TYPE_BITS[item.type]
    dtype = view_dtype(item.type)
    function: Any = _compare_and_swap if operation == "cas" else _ATOMIC[operation]
    if item.type.startswith("bf16"):
        if operation != "add":
            raise e.fail()
        function = _bf16_add
    sources = operands[2:4] if operation == "cas" else operands[2:3]
    count = len(sources[0].items) if isinstance(sources[0], Vector) else 2 if bits == 128 else 1
    width = 8 if bits == 128 else bits // 8
    if bits == 128:
        if operation != "exch":
            raise e.fail()
        dtype = np.dtype(np.uint64)
    texts = []
    for source in sources:
        if isinstance(source, Vector):
            texts.append(f"{e.name(np.stack)}({e.bound([e.value(i, f'b{bits}') for i in source.items])}, 1)")
        else:
            texts.append(e.value(source, f"b{bits}"))
    call = (
        f"{e.name(atomic)}(w, {space!r}, {address}, {active_name(e)}, {e.name(function)}, {e.name(dtype)}, "
        f"{width}, {count}, {', '.join(texts)})"
    )
    destination = operands[0]
    if isinstance(destination, Sink):
        e.line(call)
    elif isinstance(destination, Vector):
        name = e.temporary()
        e.line(f"{name} = {e.name(_columns)}({call})")
        for index, register in enumerate(destination.items):
            e.assign(register, f"{name}[{index}]", f"b{bits}")
    else:
        e.assign(destination, call, f"b{bits}")


# -- addresses ------------------------------------------------------------------------------------------------------


def _window(e: Emitter, space: str) -> str:
    if space == "shared":
        return e.name(np.full(32, SHARED_WINDOW, np.uint64))
    if space == "local":
        return e.name(np.full(32, LOCAL_WINDOW, np.uint64))
    if space == "param":
        return f"{e.name(np.uint64)}(w.cta.launch.params.base)"
    return ""


@instruction("cvta")
def _cvta(e: Emitter, item: Instruction) -> None:
    bits = TYPE_BITS[item.type]
    value = e.value(item.operands[1], f"u{bits}")
    window = _window(e, _space(item))
    if window:
        value = f"({value} {'-' if item.has('to') else '+'} {window})"
    e.assign(item.operands[0], value, f"u{bits}")


def _is_space(addresses: Any, space: str, warp: Warp) -> Any:
    window = addresses >> np.uint64(56)
    if space.startswith("shared"):
        inside = window == SHARED_WINDOW >> 56
        rank = (addresses & np.uint64(0xFFFFFFFF)) >> np.uint64(RANK_SHIFT)
        return inside & (rank == warp.cta.rank) if space != "shared::cluster" else inside
    if space == "local":
        return window == LOCAL_WINDOW >> 56
    params = warp.cta.launch.params
    is_param = (addresses - np.uint64(params.base)) < np.uint64(params.size)
    if space == "param":
        return is_param
    return (window == 0) & ~is_param if space == "global" else np.zeros(32, bool)


@instruction("isspacep")
def _isspacep(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], f"{e.name(_is_space)}({e.value(item.operands[1], 'u64')}, {item.type!r}, w)", "pred")


def _map_address(addresses: Any, rank: Any, generic: bool) -> Any:
    offset = addresses & addresses.dtype.type((1 << RANK_SHIFT) - 1)
    window = addresses.dtype.type(SHARED_WINDOW if generic else 0)
    return window + (offset | (rank.astype(addresses.dtype) << addresses.dtype.type(RANK_SHIFT)))


@instruction("mapa")
def _mapa(e: Emitter, item: Instruction) -> None:
    generic = not item.has("shared::cluster")
    source = item.operands[1]
    address = e.address(source) if isinstance(source, Address) else e.value(source, item.type)
    e.assign(
        item.operands[0], f"{e.name(_map_address)}({address}, {e.value(item.operands[2], 'u32')}, {generic})", item.type
    )


def _get_rank(addresses: Any) -> Any:
    return ((addresses & addresses.dtype.type(0xFFFFFFFF)) >> addresses.dtype.type(RANK_SHIFT)).astype(np.uint32)


@instruction("getctarank")
def _getctarank(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], f"{e.name(_get_rank)}({e.value(item.operands[1], item.type)})", "u32")


# -- cp.async -------------------------------------------------------------------------------------------------------


def copy_async(warp: Warp, target: Any, source: Any, active: Any, size: int, source_size: Any) -> None:
    """Pending until the group is waited for; it writes as late as that, and reads then or at once."""
    if active is not None:
        target, source = target[active], source[active]
        source_size = source_size[active] if source_size is not None else None
    misaligned = (target | source.astype(target.dtype)) & target.dtype.type(size - 1)
    if misaligned.any():
        raise MemoryFault(f"misaligned cp.async of {size} bytes")
    lengths = np.full(len(target), size) if source_size is None else np.minimum(source_size, size)
    clock, launch = warp.clock.copy(), warp.cta.launch

    def read() -> Any:
        data = np.zeros((len(target), size), np.uint8)
        if launch.overlaps:
            launch.overlap.access_by(bool(clock[-1]))
        for lane in range(len(target)):
            if length := int(lengths[lane]):
                data[lane, :length] = launch.device.memory.read(int(source[lane]), length)
        return data

    early = read() if launch.disorder.reads_at_once() else None

    def run() -> None:
        data = read() if early is None else early
        width = min(size, 8)
        values = data.view(f"u{width}")
        count = size // width
        shared_store(warp, target, values if count > 1 else values[:, 0], width, count, clock=clock)

    counters = launch.counters
    counters.bytes_read["global (cp.async)"] += len(target) * size
    counters.bytes_written["shared (cp.async)"] += len(target) * size
    warp.copies.append(run)


def commit_group(warp: Warp) -> None:
    warp.copy_groups.append(warp.copies)
    warp.copies = []


def wait_group(warp: Warp, pending: int) -> None:
    while len(warp.copy_groups) > pending:
        for run in warp.copy_groups.pop(0):
            run()
    warp.cta.launch.activity += 1


def wait_all(warp: Warp) -> None:
    commit_group(warp)
    wait_group(warp, 0)


def emit_cp_async(e: Emitter, item: Instruction) -> None:
    """cp.async other than bulk; called by the `cp` handler."""
    kind = item.opcode[2]
    if kind == "commit_group":
        e.line(f"{e.name(commit_group)}(w)")
    elif kind == "wait_group":
        e.line(f"{e.name(wait_group)}(w, {literal(item.operands[0])})")
    elif kind == "wait_all":
        e.line(f"{e.name(wait_all)}(w)")
    elif kind in ("ca", "cg"):
        target, source = (e.address(o) for o in item.operands[:2])
        size = literal(item.operands[2])
        rest = [o for o in item.operands[3:] if not item.has("L2::cache_hint") or o is not item.operands[-1]]
        source_size = "None"
        if rest:
            if isinstance(rest[0], Register) and rest[0].bits == 1:
                raise e.fail("cp.async with ignore-src predicate")
            source_size = e.value(rest[0], "u32")
        e.line(f"{e.name(copy_async)}(w, {target}, {source}, {active_name(e)}, {size}, {source_size})")
    else:
        raise e.fail()
