"""wgmma of SM90.

Accumulators change at once, because nvcc may copy their registers before the group is waited for; wgmma.wait_group
checks that the operands are still the same then.
"""

from typing import Any

import numpy as np

from .. import wgmma
from ..barriers import ConditionWait
from ..codegen import STAY, Emitter, instruction
from ..errors import EmulatorError
from ..ir import Instruction, Vector, literal
from ..machine import Fragment, Warp
from .async_copy import SharedPort


def multiply(
    warp: Warp, active: Any, variant: wgmma.Wgmma, old: Any, a: Any, b: Any, accumulate: Any, flags: Any
) -> Any:
    """One warp's quarter of a wgmma; reads its operands again as late as wgmma.wait_group."""
    lane = int(np.argmax(active))
    access = warp.issue("wgmma", warp.wgmma_committed + 1, warp.cta.launch.tick())
    port = SharedPort(warp.cta, "wgmma", access)
    operands: list[tuple[Any, Any]] = []

    def read(addresses: Any, count: int) -> Any:
        operands.append((addresses, port.read(addresses, count)))
        return operands[-1][1]

    left: Any = np.array(a) if isinstance(a, tuple) else int(a[lane])
    a_scale, b_scale, a_mn_major, b_mn_major = flags
    new = variant.execute(
        warp.index, left, int(b[lane]), np.array(old), read, accumulate=bool(accumulate[lane]),
        a_scale=a_scale, b_scale=b_scale, a_mn_major=a_mn_major, b_mn_major=b_mn_major,
    )  # fmt: skip

    def check() -> None:
        if not all(np.array_equal(data, port.read(addresses, data.shape[1])) for addresses, data in operands):
            raise EmulatorError("shared memory was overwritten before wgmma.wait_group of the wgmma that reads it")

    warp.cta.launch.counters.mma_operations[f"wgmma {variant.a_type}"] += 2 * 16 * variant.n * variant.k
    warp.wgmma_open.append(check)
    return new


def commit(warp: Warp) -> None:
    warp.wgmma_groups.append(warp.wgmma_open)
    warp.wgmma_open = []
    warp.wgmma_committed += 1


def wait(warp: Warp, fragment: Fragment, pending: int) -> bool:
    """True while the warp waits for the others of its warpgroup to issue what it waits for.

    A group is one of the whole warpgroup (PTX ISA, "wgmma.commit_group"): once it is over, none of the four warps'
    quarters reads its operands any more. CUTLASS's example 63 writes over them then, with no barrier between.
    """
    fragment.wait = None
    group = warp.wgmma_committed - pending
    first = warp.index // 4 * 4
    warps = warp.cta.warps[first : first + 4]
    if any(other.wgmma_committed < group for other in warps):
        text = f"wgmma.wait_group waits for the other warps to commit group {group}"
        fragment.wait = ConditionWait(lambda: all(other.wgmma_committed >= group for other in warps), text)
        return True
    for other in warps:
        while other.wgmma_committed - len(other.wgmma_groups) < group:
            for check in other.wgmma_groups.pop(0):
                check()
        warp.see("wgmma", group, other)
    return False


@instruction("wgmma")
def _wgmma(e: Emitter, item: Instruction) -> None:
    kind = item.opcode[1]
    if kind == "fence":
        return
    if kind == "commit_group":
        e.line(f"{e.name(commit)}(w)")
    elif kind == "wait_group":
        e.line(f"if {e.name(wait)}(w, f, {literal(item.operands[0])}): return {STAY}")
    elif kind == "mma_async":
        variant = wgmma.decode(item.opcode)
        d, a, b, scale_d, *rest = item.operands
        assert isinstance(d, Vector)
        old = e.bound([e.value(i, "b32") for i in d.items])
        left = e.bound([e.value(i, "b32") for i in a.items]) if isinstance(a, Vector) else e.value(a, "u64")
        values = [literal(o) for o in rest]
        scales, majors = (values[:2] or [1, 1]), values[2:]
        if isinstance(a, Vector):
            majors = [0, *majors]
        flags = (*scales, *(bool(m) for m in ([*majors, 0, 0])[:2]))
        arguments = f"{old}, {left}, {e.value(b, 'u64')}, {e.value(scale_d, 'pred')}, {flags!r}"
        e.merge_call(multiply, f"w, {e.mask}, {e.name(variant)}, {arguments}", list(d.items), "b32")
    else:
        raise e.fail()
