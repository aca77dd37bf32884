"""Fences of proxies, of mbarriers and of tensor maps."""

from ..codegen import Emitter, instruction
from ..ir import Instruction
from ..machine import Warp
from . import tensormap


def fence_async(warp: Warp) -> None:
    """`fence.proxy.async`: what this thread has seen of shared memory becomes visible to the async proxy."""
    launch = warp.cta.launch
    now = launch.tick()
    for cta in warp.cta.cluster.ctas:
        if cta.shared.pending_writes:
            cta.shared.fence(warp.clock, now)
    fence_mbarriers(warp)


def fence_mbarriers(warp: Warp) -> None:
    """`fence.mbarrier_init`: what this thread initialised becomes visible to the async proxy."""
    for barrier in warp.unfenced_mbarriers:
        barrier.fenced.append((warp.id, int(warp.clock[warp.id])))
    warp.unfenced_mbarriers.clear()


@instruction("fence")
def _fence(e: Emitter, item: Instruction) -> None:
    """Memory is sequentially consistent here: only the fences of the async proxy and of mbarriers act."""
    if item.opcode[1:3] == ("proxy", "async") and not item.has("global"):
        e.line(f"{e.name(fence_async)}(w)")
    elif item.has("tensormap::generic") and item.has("acquire"):
        e.line(f"{e.name(tensormap.acquire)}(w, {e.mask}, {e.address(item.operands[0])})")
    elif item.has("tensormap::generic"):
        e.line(f"{e.name(tensormap.release)}(w)")
    elif item.has("mbarrier_init"):
        e.line(f"{e.name(fence_mbarriers)}(w)")
