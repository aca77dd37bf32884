"""Instructions that edit tensor maps in memory, and the fences that make an edited one visible to copies (PTX ISA,
"fence.proxy.tensormap": a release by who edits it, an acquire by who copies by it)."""

from typing import Any

import numpy as np

from .. import tensor_map
from ..codegen import Emitter, instruction
from ..errors import ProxyFenceError
from ..ir import Instruction, literal
from ..machine import Warp
from ..memory import OFFSET_MASK, SHARED_WINDOW, Bytes
from .sync import lane_values

_SIZE = 128


def _map_bytes(warp: Warp, address: int, shared: bool) -> Bytes:
    """The tensor map's bytes in place, in this CTA's shared memory or in global memory."""
    if shared or address >= SHARED_WINDOW:
        memory = warp.cta.shared
        memory.mark_written(address & OFFSET_MASK, _SIZE)
        return memory.slice((address & OFFSET_MASK) + memory.base, _SIZE, "tensormap")
    return warp.cta.launch.device.memory.read(address, _SIZE)


def visible(warp: Warp, address: int) -> Bytes:
    """The tensor map by which a warp's copy goes. Raises ProxyFenceError where it was edited in this launch and not
    released, or where this warp did not acquire it since."""
    launch = warp.cta.launch
    data = launch.device.memory.read(address, _SIZE)
    if address in launch.unreleased_maps:
        raise ProxyFenceError(f"tensor map at {address:#x} was edited with no fence.proxy.tensormap::generic.release")
    known = warp.tensor_maps.get(address)
    if known is None and address not in launch.edited_maps:
        warp.tensor_maps[address] = data.tobytes()
    elif known != data.tobytes():
        raise ProxyFenceError(
            f"tensor map at {address:#x} was edited, and {warp.name} copies by it with no "
            "fence.proxy.tensormap::generic.acquire of it since"
        )
    return data


def acquire(warp: Warp, active: Any, addresses: Any) -> None:
    for address in set(addresses[active].tolist()):
        warp.tensor_maps[address] = warp.cta.launch.device.memory.read(address, _SIZE).tobytes()


def release(warp: Warp) -> None:
    """What was edited in this launch, by whom this warp has met: all, as memory is sequentially consistent."""
    warp.cta.launch.unreleased_maps.clear()


def replace(warp: Warp, active: Any, addresses: Any, field: str, values: Any, ordinal: int, shared: bool) -> None:
    for _, address, value in lane_values(active, addresses, values):
        data = _map_bytes(warp, address, shared)
        if not (shared or address >= SHARED_WINDOW):
            warp.cta.launch.edited_maps.add(address)
            warp.cta.launch.unreleased_maps.add(address)
        data[:] = np.frombuffer(tensor_map.replace(data, field, value, ordinal), np.uint8)
    warp.cta.launch.activity += 1


def copy(warp: Warp, active: Any, target: Any, source: Any) -> None:
    """tensormap.cp_fenceproxy: the warp together copies one map from shared to global memory."""
    lane = int(np.argmax(active))
    data = _map_bytes(warp, int(source[lane]), True)
    _map_bytes(warp, int(target[lane]), False)[:] = data
    warp.cta.launch.edited_maps.add(int(target[lane]))
    warp.cta.launch.activity += 1


@instruction("tensormap")
def _tensormap(e: Emitter, item: Instruction) -> None:
    if item.opcode[1] == "cp_fenceproxy":
        target, source = (e.address(o) for o in item.operands[:2])
        e.line(f"{e.name(copy)}(w, {e.mask}, {target}, {source})")
        return
    if item.opcode[1] != "replace":
        raise e.fail()
    address, *rest = item.operands
    ordinal = literal(rest[0]) if len(rest) > 1 else 0
    value = e.value(rest[-1], item.type)
    shared = item.has("shared::cta")
    arguments = f"{e.address(address)}, {item.opcode[3]!r}, {value}, {ordinal}, {shared}"
    e.line(f"{e.name(replace)}(w, {e.mask}, {arguments})")
