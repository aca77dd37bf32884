"""Cluster launch control: a running cluster takes over one that was not launched yet."""

from typing import Any

import numpy as np

from ..codegen import Emitter, instruction
from ..errors import EmulatorError
from ..ir import Instruction, Vector
from ..machine import Warp
from ..memory import OFFSET_MASK, RANK_SHIFT
from .async_copy import SharedPort
from .sync import lane_values, shared_address

_CANCELLED = 1


def try_cancel(warp: Warp, active: Any, target: Any, barriers: Any, everywhere: bool) -> None:
    """Write the 16-byte response (first CTA's coordinates and a success word, a format of our own) and complete it."""
    cta = warp.cta
    if cta.cluster.saw_the_last:
        raise EmulatorError("clusterlaunchcontrol.try_cancel after a failure was seen")
    launch = cta.launch
    issued, clock = launch.tick(), warp.hand_over()
    for _, address, barrier in lane_values(active, target, barriers):
        ranks = range(cta.cluster.size) if everywhere else [cta.rank]
        arrivals = [(cta.cluster.ctas[r], warp.mbarrier(r << RANK_SHIFT | barrier & OFFSET_MASK, True)) for r in ranks]

        def run(address: int = address, arrivals: Any = arrivals) -> None:
            response = np.zeros(4, np.uint32)
            found = next((i for i, (_, shape) in enumerate(launch.waiting) if shape == cta.cluster.shape), None)
            if found is not None:
                response[:] = [*launch.waiting[found][0], _CANCELLED]
                del launch.waiting[found]
            for peer, arrival in arrivals:
                port = SharedPort(peer, "cluster launch control", arrival.access(clock, issued))
                port.write(np.array([address & OFFSET_MASK]), response.view(np.uint8)[None, :])
                arrival.transact(-16)

        launch.submit(run, f"clusterlaunchcontrol.try_cancel issued by {warp.name}", cta)


def _is_cancelled(warp: Warp, active: Any, response: Any) -> Any:
    cancelled = (response[:, 1] >> np.uint64(32)) == _CANCELLED
    if not cancelled[active].all():
        warp.cta.cluster.saw_the_last = True
    return cancelled


def _first_cta(response: Any) -> list[Any]:
    words = np.ascontiguousarray(response).view(np.uint32)
    return [np.ascontiguousarray(words[:, i]) for i in range(3)]


@instruction("clusterlaunchcontrol")
def _cluster_launch_control(e: Emitter, item: Instruction) -> None:
    if item.has("try_cancel"):
        target, barrier = (shared_address(e, item, o) for o in item.operands)
        e.line(f"{e.name(try_cancel)}(w, {e.mask}, {target}, {barrier}, {item.has('multicast::cluster::all')})")
    elif item.has("is_canceled"):
        e.assign(item.operands[0], f"{e.name(_is_cancelled)}(w, {e.mask}, {e.value(item.operands[1], 'b128')})", "pred")
    elif item.has("get_first_ctaid") and isinstance(item.operands[0], Vector):
        e.merge_call(_first_cta, e.value(item.operands[1], "b128"), list(item.operands[0].items[:3]), "u32")
    else:
        axis = next((i for i, n in enumerate("xyz") if item.has(f"get_first_ctaid::{n}")), None)
        if axis is None:
            raise e.fail()
        e.assign(item.operands[0], f"{e.name(_first_cta)}({e.value(item.operands[1], 'b128')})[{axis}]", "u32")
