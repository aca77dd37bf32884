"""Instructions that edit tensor maps in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import tensor_map
from ..codegen import Emitter, instruction
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


def replace(warp: Warp, active: Any, addresses: Any, field: str, values: Any, ordinal: int, shared: bool) -> None:
    for _, address, value in lane_values(active, addresses, values):
        data = _map_bytes(warp, address, shared)
        data[:] = np.frombuffer(tensor_map.replace(data, field, value, ordinal), np.uint8)
    warp.cta.launch.activity += 1


def copy(warp: Warp, active: Any, target: Any, source: Any) -> None:
    """tensormap.cp_fenceproxy: the warp together copies one map from shared to global memory."""
    lane = int(np.argmax(active))
    data = _map_bytes(warp, int(source[lane]), True)
    _map_bytes(warp, int(target[lane]), False)[:] = data
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
