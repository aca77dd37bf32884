"""wgmma of SM90.

Accumulators change at once, because nvcc may copy their registers before the group is waited for; wgmma.wait_group
checks that reading the operands as late as that would have given the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import wgmma
from ..codegen import Emitter, instruction
from ..errors import EmulatorError
from ..ir import Instruction, Register, Vector, literal
from ..machine import Warp
from .async_copy import SharedPort


def multiply(
    warp: Warp,
    active: Any,
    variant: wgmma.Wgmma,
    registers: tuple[int, ...],
    a: Any,
    b: Any,
    accumulate: Any,
    flags: Any,
) -> None:
    """One warp's quarter of a wgmma; reads its operands as late as wgmma.wait_group."""
    lane = int(np.argmax(active))
    issued = warp.cta.launch.tick()
    left: Any = np.array(a) if isinstance(a, tuple) else int(a[lane])
    descriptor, keep = int(b[lane]), bool(accumulate[lane])
    a_scale, b_scale, a_mn_major, b_mn_major = flags

    old = np.array([warp.registers[i] for i in registers])

    def execute() -> Any:
        return variant.execute(
            warp.index, left, descriptor, old, SharedPort(warp.cta, "wgmma", issued).read, accumulate=keep,
            a_scale=a_scale, b_scale=b_scale, a_mn_major=a_mn_major, b_mn_major=b_mn_major,
        )  # fmt: skip

    new = execute()
    for index, value in zip(registers, new, strict=True):
        warp.registers[index] = np.ascontiguousarray(value)

    def check() -> None:
        if not np.array_equal(new, execute()):
            raise EmulatorError("shared memory was overwritten before wgmma.wait_group of the wgmma that reads it")

    warp.cta.launch.counters.mma_operations[f"wgmma {variant.a_type}"] += 2 * 16 * variant.n * variant.k
    warp.wgmma_open.append(check)


def commit(warp: Warp) -> None:
    warp.wgmma_groups.append(warp.wgmma_open)
    warp.wgmma_open = []


def wait(warp: Warp, pending: int) -> None:
    while len(warp.wgmma_groups) > pending:
        for check in warp.wgmma_groups.pop(0):
            check()


@instruction("wgmma")
def _wgmma(e: Emitter, item: Instruction) -> None:
    kind = item.opcode[1]
    if kind == "fence":
        return
    if kind == "commit_group":
        e.line(f"{e.name(commit)}(w)")
    elif kind == "wait_group":
        e.line(f"{e.name(wait)}(w, {literal(item.operands[0])})")
    elif kind == "mma_async":
        variant = wgmma.decode(item.opcode)
        d, a, b, scale_d, *rest = item.operands
        assert isinstance(d, Vector)
        registers = tuple(r.index for r in d.items if isinstance(r, Register))
        left = e.bound([e.value(i, "b32") for i in a.items]) if isinstance(a, Vector) else e.value(a, "u64")
        values = [literal(o) for o in rest]
        scales, majors = (values[:2] or [1, 1]), values[2:]
        if isinstance(a, Vector):
            majors = [0, *majors]
        flags = (*scales, *(bool(m) for m in ([*majors, 0, 0])[:2]))
        e.line(
            f"{e.name(multiply)}(w, {e.mask}, {e.name(variant)}, {e.name(registers)}, {left}, {e.value(b, 'u64')}, "
            f"{e.value(scale_d, 'pred')}, {flags!r})"
        )
    else:
        raise e.fail()
