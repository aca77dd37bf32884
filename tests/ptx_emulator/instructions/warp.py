"""Warp collectives: shuffles, votes, elections, matches, reductions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..barriers import LaneWait
from ..codegen import STAY, Emitter, instruction
from ..errors import EmulatorError
from ..ir import Instruction, Operand, Pair
from ..machine import ALL_LANES, Fragment, Warp, lane_bits

_LANE = np.arange(32)
# What shfl.sync reads from a lane that does not take part: the ISA leaves it undefined.
_UNDEFINED = np.uint32(0xFFBADBAD)


def converge(warp: Warp, fragment: Fragment, members: Any, active: Any, name: str) -> bool:
    """Whether the lanes named by `members` are all here; False leaves the fragment waiting for the others.

    `bar.warp.sync` may be reached by fragments separately. Other collectives exchange values, so they need the lanes in
    one fragment: that diverged lanes meet at the same instruction is guaranteed by reconvergence for nvcc's code.
    """
    if fragment.state == "released":
        fragment.state = None
        return True
    lanes = lane_bits(active)
    wanted = int(members[int(np.argmax(active))])
    if lanes & ~wanted:
        raise EmulatorError(f"{name} by lanes {lanes:#010x}, of which its mask {wanted:#010x} names only some")
    missing = wanted & ~lanes & ~warp.exited & warp.live
    if not missing:
        return True
    if name != "bar.warp.sync":
        raise EmulatorError(f"{name} names lanes {wanted:#010x}, but {missing:#010x} are not there (diverged)")
    arrived = warp.arrived_lanes.get(wanted, 0) | lanes
    warp.arrived_lanes[wanted] = arrived
    if arrived & ~warp.exited == wanted & warp.live & ~warp.exited:
        warp.release_lanes(wanted, arrived)
        warp.arrived_lanes.pop(wanted, None)
        return True
    fragment.wait = LaneWait(warp, wanted, wanted & warp.live, name)
    return False


def emit_converge(e: Emitter, item: Instruction, members: Operand) -> None:
    """Before a collective of the lanes that `members` names."""
    if e.unmasked and e.known(members) == ALL_LANES:
        return
    name = ".".join(item.opcode[:3]) if item.name == "bar" else ".".join(item.opcode[:2])
    e.line(f"if not {e.name(converge)}(w, f, {e.value(members, 'u32')}, {e.mask}, {name!r}): return {STAY}")


@instruction("activemask")
def _activemask(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], f"{e.name(_spread_bits)}({e.mask})", "u32")


def _spread_bits(predicate: Any) -> Any:
    return np.full(32, lane_bits(predicate), np.uint32)


def _sources(b: Any, c: Any, mode: str) -> tuple[Any, Any]:
    """PTX ISA `shfl`: c holds the clamp (bits 0-4) and the segment mask (bits 8-12)."""
    b = b.astype(np.int64) & 31
    clamp, segment = c.astype(np.int64) & 31, c.astype(np.int64) >> 8 & 31
    highest = (_LANE & segment) | (clamp & ~segment)
    lowest = _LANE & segment
    if mode == "up":
        source = _LANE - b
        valid = source >= highest
    elif mode == "down":
        source = _LANE + b
        valid = source <= highest
    elif mode == "bfly":
        source = _LANE ^ b
        valid = source <= highest
    else:
        source = lowest | (b & ~segment)
        valid = source <= highest
    return np.where(valid, source, _LANE), valid


def _shuffle(value: Any, active: Any, sources: tuple[Any, Any]) -> tuple[Any, Any]:
    source, valid = sources
    return np.where(active[source], value[source], _UNDEFINED), valid


@instruction("shfl")
def _shfl(e: Emitter, item: Instruction) -> None:
    emit_converge(e, item, item.operands[4])
    value, mode = e.value(item.operands[1], "b32"), item.opcode[2]
    b, c = (e.known(o) for o in item.operands[2:4])
    if b is None or c is None:
        texts = [e.value(o, "u32") for o in item.operands[2:4]]
        sources = f"{e.name(_sources)}({texts[0]}, {texts[1]}, {mode!r})"
    else:
        sources = e.name(_sources(np.full(32, b), np.full(32, c), mode))
    name = e.temporary()
    e.line(f"{name} = {e.name(_shuffle)}({value}, {e.mask}, {sources})")
    destination = item.operands[0]
    if isinstance(destination, Pair):
        e.assign(destination.first, f"{name}[0]", "b32")
        e.assign(destination.second, f"{name}[1]", "pred")
    else:
        e.assign(destination, f"{name}[0]", "b32")


def _vote_all(p: Any, active: Any) -> Any:
    return np.full(32, bool(p[active].all()))


def _vote_any(p: Any, active: Any) -> Any:
    return np.full(32, bool(p[active].any()))


def _vote_uniform(p: Any, active: Any) -> Any:
    chosen = p[active]
    return np.full(32, bool(chosen.all() or not chosen.any()))


def _ballot(p: Any, active: Any) -> Any:
    return np.full(32, lane_bits(p & active), np.uint32)


@instruction("vote")
def _vote(e: Emitter, item: Instruction) -> None:
    emit_converge(e, item, item.operands[2])
    predicate = e.value(item.operands[1], "pred")
    mode = item.opcode[2]
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "all": _vote_all,
        "any": _vote_any,
        "uni": _vote_uniform,
        "ballot": _ballot,
    }
    text = f"{e.name(functions[mode])}({predicate}, {e.mask})"
    e.assign(item.operands[0], text, "u32" if mode == "ballot" else "pred")


def _elect(active: Any) -> tuple[Any, Any]:
    leader = int(np.argmax(active))
    return np.full(32, leader, np.uint32), leader == _LANE


@instruction("elect")
def _elect_handler(e: Emitter, item: Instruction) -> None:
    emit_converge(e, item, item.operands[1])
    name = e.temporary()
    e.line(f"{name} = {e.name(_elect)}({e.mask})")
    destination = item.operands[0]
    if not isinstance(destination, Pair):
        raise e.fail()
    e.assign(destination.first, f"{name}[0]", "u32")
    e.assign(destination.second, f"{name}[1]", "pred")


def _match_any(value: Any, active: Any) -> Any:
    out = np.zeros(32, np.uint32)
    for unique in np.unique(value[active]).tolist():
        same = (value == unique) & active
        out[same] = lane_bits(same)
    return out


def _match_all(value: Any, active: Any) -> tuple[Any, Any]:
    same = len(np.unique(value[active])) == 1
    return np.full(32, lane_bits(active) if same else 0, np.uint32), np.full(32, same)


@instruction("match")
def _match(e: Emitter, item: Instruction) -> None:
    emit_converge(e, item, item.operands[2])
    value = e.value(item.operands[1], item.type)
    destination = item.operands[0]
    if item.opcode[1] == "any":
        e.assign(destination, f"{e.name(_match_any)}({value}, {e.mask})", "u32")
        return
    name = e.temporary()
    e.line(f"{name} = {e.name(_match_all)}({value}, {e.mask})")
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    e.assign(first, f"{name}[0]", "u32")
    if second is not None:
        e.assign(second, f"{name}[1]", "pred")


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def _reduce(value: Any, active: Any, function: Any) -> Any:
    return np.full(32, function.reduce(value[active], dtype=value.dtype), value.dtype)


def _reduce_float(value: Any, active: Any, small: bool, absolute: bool, nan: bool) -> Any:
    chosen = np.abs(value[active]) if absolute else value[active]
    function = (np.minimum if small else np.maximum) if nan else (np.fmin if small else np.fmax)
    return np.full(32, function.reduce(chosen), value.dtype)


@instruction("redux")
def _redux(e: Emitter, item: Instruction) -> None:
    emit_converge(e, item, item.operands[2])
    value = e.value(item.operands[1], item.type)
    mode = item.opcode[2]
    if item.type == "f32":
        flags = f"{mode == 'min'}, {item.has('abs')}, {item.has('NaN')}"
        e.assign(item.operands[0], f"{e.name(_reduce_float)}({value}, {e.mask}, {flags})", "f32")
        return
    e.assign(item.operands[0], f"{e.name(_reduce)}({value}, {e.mask}, {e.name(_REDUCE[mode])})", item.type)
