"""Calls that are not inlined, traps, hints."""

from typing import Any

import numpy as np

from ..barriers import ConditionWait
from ..codegen import STAY, Emitter, instruction
from ..errors import EmulatorError
from ..ir import Group, Immediate, Instruction, Symbol
from ..machine import Fragment, Warp


def _trap(text: str) -> None:
    raise EmulatorError(f"the kernel executed {text}")


@instruction("trap", "brkpt")
def _emit_trap(e: Emitter, item: Instruction) -> None:
    e.line(f"{e.name(_trap)}({item.name!r})")


def _text(warp: Warp, address: int) -> str:
    region = warp.cta.launch.device.memory.region(address)
    data = region.data[address - region.base : region.size].tobytes()
    return data.split(b"\0")[0].decode("utf-8", "replace")


def _assert_fail(warp: Warp, active: Any, message: Any, file: Any, line: Any, function: Any) -> None:
    lane = int(np.argmax(active))
    texts = [_text(warp, int(value[lane])) for value in (message, file, function)]
    raise EmulatorError(f"device assertion failed: {texts[0]} in {texts[2]} at {texts[1]}:{int(line[lane])}")


def _local_value(warp: Warp, offset: int, width: int) -> Any:
    return np.ascontiguousarray(warp.local.data[:, offset : offset + width]).view(f"u{width}").reshape(32)


@instruction("call")
def _call(e: Emitter, item: Instruction) -> None:
    """Only what the CUDA runtime defines: functions of the module are inlined before."""
    name = next(o.name for o in item.operands if isinstance(o, Symbol))
    groups = [o for o in item.operands if isinstance(o, Group)]
    offsets = [e.program.local[s.name] for s in groups[-1].items if isinstance(s, Symbol)]
    read = e.name(_local_value)
    if name == "__assertfail":
        message, file, line, function = (f"{read}(w, {o}, {8 if i != 2 else 4})" for i, o in enumerate(offsets[:4]))
        e.line(f"{e.name(_assert_fail)}(w, {e.mask}, {message}, {file}, {line}, {function})")
    elif name == "vprintf":
        e.line(f"{e.name(_print)}(w, {e.mask}, {read}(w, {offsets[0]}, 8))")
    else:
        raise e.fail(f"call of unknown function {name}")


def _print(warp: Warp, active: Any, format_address: Any) -> None:
    """printf is shown unformatted: enough to see that a message was printed."""
    print(_text(warp, int(format_address[int(np.argmax(active))])), end="")


def move_registers(warp: Warp, fragment: Fragment, count: int, more: bool) -> bool:
    """setmaxnreg; True while the CTA's other warps hold too many registers (PTX ISA, "setmaxnreg")."""
    cta = warp.cta
    held = cta.warp_registers[warp.index]
    if fragment.wait is None:
        if (count < held) if more else (count > held):
            raise EmulatorError(f"setmaxnreg.{'inc' if more else 'dec'} to {count}: the warp has {held} registers")
        cta.move_registers(warp.index, count)

    def fits() -> bool:
        return 32 * (sum(cta.warp_registers) - held + count) <= cta.register_pool

    if more and not fits():
        asked = 32 * (sum(cta.warp_registers) - held + count)
        text = (
            f"setmaxnreg: the warps of {cta.name} ask for {asked} registers, it was launched with {cta.register_pool}"
        )
        fragment.wait = ConditionWait(fits, text)
        return True
    fragment.wait = None
    cta.warp_registers[warp.index] = count
    cta.launch.activity += 1
    return False


@instruction("setmaxnreg")
def _setmaxnreg(e: Emitter, item: Instruction) -> None:
    (count,) = item.operands
    assert isinstance(count, Immediate)
    if not 24 <= count.value <= 256 or count.value % 8:
        raise EmulatorError(f"line {item.line}: {item.text}: a multiple of 8 from 24 to 256 is needed")
    e.line(f"if {e.name(move_registers)}(w, f, {count.value}, {item.has('inc')}): return {STAY}")


def await_launches(warp: Warp) -> None:
    """`griddepcontrol.wait`: the earlier launches are done, for this warp and who synchronises with it."""
    warp.clock[-1] = 1
    warp.cta.launch.overlap.wait()


def let_next_start(warp: Warp) -> None:
    """`griddepcontrol.launch_dependents`: no launch does start sooner, but what the next one may meet depends on it."""
    warp.cta.launch.overlap.trigger(not warp.cta.launch.overlaps or bool(warp.clock[-1]))


@instruction("griddepcontrol")
def _dependent_launch(e: Emitter, item: Instruction) -> None:
    e.line(f"{e.name(await_launches if item.has('wait') else let_next_start)}(w)")


@instruction("membar", "prefetch", "prefetchu", "applypriority", "discard", "pmevent")
def _hint(e: Emitter, item: Instruction) -> None:
    """Memory is sequentially consistent."""


@instruction("createpolicy")
def _policy(e: Emitter, item: Instruction) -> None:
    e.assign(item.operands[0], e.name(np.zeros(32, np.uint64)), "u64")
