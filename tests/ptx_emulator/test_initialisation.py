"""What is used before its initialisation: barriers, registers, local memory; barriers that others cannot see yet."""

import numpy as np
import pytest

from ptx_emulator.errors import EmulatorError, ProxyFenceError, RaceError
from ptx_emulator.hand_written import BULK_LOAD, WAIT, run

INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;"
FENCE = "fence.mbarrier_init.release.cluster;"
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];"


@pytest.mark.parametrize("fence", [FENCE, "fence.proxy.async.shared::cta;", "fence.proxy.async;"])
def test_a_copy_completes_on_a_barrier_that_a_fence_made_visible(fence: str) -> None:
    read = "ld.shared.u32 %r7, [%r5+1024]; st.global.u32 [%rd3], %r7;"
    run(INIT + fence + "bar.sync 0;" + BULK_LOAD + WAIT + read)
    with pytest.raises(ProxyFenceError, match=r"no fence\.mbarrier_init"):
        run(INIT + "bar.sync 0;" + BULK_LOAD + WAIT + read)


def test_the_threads_of_a_block_need_a_barrier_but_no_fence() -> None:
    run(INIT + "bar.sync 0;" + ARRIVE + WAIT, threads=64)
    with pytest.raises(RaceError, match="which warp 0 initialised, with no barrier between"):
        run(INIT + ARRIVE + WAIT, threads=64)


def test_a_barrier_is_initialised_again_only_after_it_was_invalidated() -> None:
    run(INIT + "@%p1 mbarrier.inval.shared::cta.b64 [%r3];" + INIT)
    with pytest.raises(EmulatorError, match="which is one already"):
        run(INIT + INIT)


def test_registers_and_local_memory_start_with_garbage() -> None:
    register = run("st.global.u32 [%rd3], %r31;")
    assert len(set(register[:32].tolist())) > 20
    assert (register[:32] == 0).any()
    local = run(".local .align 4 .b8 own[8]; mov.u32 %r6, own; ld.local.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;")
    assert (local[:32] != 0).all()
    assert not np.array_equal(register[:32], local[:32])
