"""Accesses of shared and tensor memory that nothing orders, in hand-written PTX: reported whatever the schedule."""

import numpy as np
import pytest

from ptx_emulator.errors import EmulatorError, MemoryFault, ProxyFenceError, RaceError
from ptx_emulator.hand_written import BARRIER, WAIT, WRITE_AND_STORE, run

EXCHANGE = """
    st.shared.u32 [%r5], %r2;
    {barrier}
    xor.b32 %r6, %r4, 128;
    add.u32 %r6, %r3, %r6;
    ld.{kind}shared.u32 %r7, [%r6];
    st.global.u32 [%rd3], %r7;
"""


def test_race_between_warps() -> None:
    expected = np.arange(64) ^ 32
    np.testing.assert_array_equal(run(EXCHANGE.format(barrier="bar.sync 0;", kind=""), threads=64)[:64], expected)
    late = "setp.lt.u32 %p2, %r2, 32; @%p2 nanosleep.u32 20;"  # the other warp's value is there, but by luck
    with pytest.raises(RaceError, match="warp 0 wrote with no barrier"):
        run(EXCHANGE.format(barrier=late, kind=""), threads=64)
    np.testing.assert_array_equal(run(EXCHANGE.format(barrier=late, kind="volatile."), threads=64)[:64], expected)


def test_a_write_races_with_an_earlier_read_of_another_warp() -> None:
    """Whatever the schedule: here the reader is first, by luck."""
    body = """
    st.shared.u32 [%r5], %r2;
    bar.sync 0;
    setp.lt.u32 %p2, %r2, 32;
    @!%p2 bra late;
    ld.shared.u32 %r7, [%r5+128];
    {barrier}
    st.global.u32 [%rd3], %r7;
    bra done;
late:
    nanosleep.u32 20;
    {barrier}
    st.shared.u32 [%r5], %r4;
done:
"""
    np.testing.assert_array_equal(run(body.format(barrier="bar.sync 1, 64;"), threads=64)[:32], np.arange(32, 64))
    with pytest.raises(RaceError, match=r"write by warp 1 .* which warp 0 reads"):
        run(body.format(barrier=""), threads=64)


def test_two_warps_that_write_one_word_race_unless_they_write_the_same() -> None:
    np.testing.assert_array_equal(run("st.shared.u32 [%r3], 7; st.global.u32 [%rd3], 7;", threads=64)[:64], [7] * 64)
    with pytest.raises(RaceError, match=r"write by warp 1 .* which warp 0 writes"):
        run("st.shared.u32 [%r3], %r2;", threads=64)


def test_what_arrives_at_a_barrier_after_it_opened_is_not_seen() -> None:
    """Warp 1 waits for the first phase alone; what warp 0 wrote before its second arrival is not ordered."""
    body = """
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra wait;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
    st.shared.u32 [%r5+512], %r2;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
    bra done;
wait:
    nanosleep.u32 20;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], {parity};
    @!%p3 bra again;
    ld.shared.u32 %r7, [%r5+384];
    st.global.u32 [%rd3], %r7;
done:
"""
    np.testing.assert_array_equal(run(body.format(parity=1), threads=64)[32:64], np.arange(32))


# A bulk load over words that warp 1 has read; it may be issued once warp 1 has arrived on the second barrier.
OVERWRITE = """
    st.shared.u32 [%r5+1024], %r2;
    fence.proxy.async.shared::cta;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.init.shared::cta.b64 [%r3+8], 32;
    bar.sync 0;
    setp.ge.u32 %p3, %r2, 32;
    @%p3 bra reader;
    {wait}
    add.u32 %r6, %r3, 1024;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 256, [%r3];
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra again;
    bra done;
reader:
    ld.shared.u32 %r7, [%r5+1024];
    mbarrier.arrive.shared::cta.b64 _, [%r3+8];
    st.global.u32 [%rd3], %r7;
done:
"""
RELEASED = "free: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3+8], 0; @!%p4 bra free;"


def test_a_copy_over_what_another_warp_may_still_read() -> None:
    np.testing.assert_array_equal(run(OVERWRITE.format(wait=RELEASED), threads=64)[32:64], np.arange(32, 64))
    with pytest.raises(RaceError, match=r"bulk copy: write .* which warp 1 reads"):
        run(OVERWRITE.format(wait=""), threads=64)
    with pytest.raises(ProxyFenceError, match="bulk copy writes"):
        run(OVERWRITE.format(wait=RELEASED).replace("fence.proxy.async.shared::cta;", ""), threads=64)


def test_a_write_over_what_a_copy_may_still_read() -> None:
    body = WRITE_AND_STORE.format(fence="fence.proxy.async.shared::cta;") + "bar.sync 0; st.shared.u32 [%r5+1024], %r4;"
    run(body, threads=64)
    with pytest.raises((RaceError, ProxyFenceError)):  # of the copy, or of the write, whichever is last
        run(body.replace("wait_group 0;", "wait_group 1;"), threads=64)


# Warp 0 loads a column and gives it up; warp 4 writes it again by tcgen05.st.
REUSE = """
    setp.lt.u32 %p2, %r2, 32;
    setp.lt.u32 %p3, %r2, 128;
    @!%p2 bra others;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
    ld.shared.u32 %r6, [%r3];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r4};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r6];
    WAIT
    st.global.u32 [%rd3], %r7;
others:
    bar.sync 0;
    @%p3 bra last;
    ld.shared.u32 %r6, [%r3];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r2};
    tcgen05.wait::st.sync.aligned;
last:
    bar.sync 0;
    @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
"""


def test_tensor_memory_is_written_again_before_its_load_was_waited_for() -> None:
    waited = REUSE.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")
    np.testing.assert_array_equal(run(waited, threads=160)[:32], 4 * np.arange(32))
    with pytest.raises(RaceError, match=r"writes tensor memory .* which tcgen05\.ld of warp 0 reads"):
        run(REUSE.replace("WAIT", ""), threads=160)
    with pytest.raises(RaceError, match=r"of shared memory .* which warp 0 wrote"):  # the address that alloc wrote
        run(waited.replace("bar.sync 0;", "", 1), threads=160)


def test_tensor_memory_is_freed_only_once_its_users_are_done() -> None:
    waited = REUSE.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")
    with pytest.raises(RaceError, match=r"tcgen05\.dealloc frees tensor memory .* which tcgen05\.st of warp 4 writes"):
        run(waited.replace("last:\n    bar.sync 0;", "last:"), threads=160)


# A warpgroup multiplies 64 rows of shared memory by 8 of them; then each of its warps writes over a part.
MULTIPLY = """
    .reg .f32 %d<4>;
    st.shared.u32 [%r5], 0; st.shared.u32 [%r5+1024], 0; st.shared.u32 [%r5+512], 0; st.shared.u32 [%r5+1536], 0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ge.u32 %p2, %r2, 128;
    @%p2 bra over;
    shr.u32 %r6, %r3, 4;
    or.b32 %r6, %r6, 0x80000;
    mov.b64 %rd4, {%r6, 16};
    mov.f32 %d0, 0f3F800000; mov.f32 %d1, %d0; mov.f32 %d2, %d0; mov.f32 %d3, %d0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%d0, %d1, %d2, %d3}, %rd4, %rd4, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.shared.u32 [%r5], %r2;
    st.global.f32 [%rd3], %d3;
over:
"""


def test_a_warpgroup_waits_for_all_of_its_multiplication() -> None:
    """None of its warps needs a barrier before it writes over the operands, as in CUTLASS's example 63."""
    done = run(MULTIPLY, threads=128, words=128, target="sm_90a")
    np.testing.assert_array_equal(done.view(np.float32), np.ones(128))
    for wrong in (
        MULTIPLY.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"),
        MULTIPLY.replace("over:", "over: @%p2 st.shared.u32 [%r5+-512], %r2;"),  # of another warpgroup
    ):
        with pytest.raises(EmulatorError, match=r"no barrier or wait between|without a later fence"):
            run(wrong, threads=256, words=256, target="sm_90a")


def test_shared_memory_of_a_block_that_has_exited() -> None:
    body = """
    st.shared.u32 [%r5], %r2;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r8, %cluster_ctarank;
    setp.eq.u32 %p3, %r8, 1;
    @%p3 bra done;
    SLEEP
    mapa.shared::cluster.u32 %r6, %r5, 1;
    ld.shared::cluster.u32 %r7, [%r6];
    st.global.u32 [%rd3], %r7;
done:
    END
"""
    both = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    sleep = "nanosleep.u32 20;"
    result = run(body.replace("SLEEP", sleep).replace("END", both), cluster=2)
    np.testing.assert_array_equal(result[:32], np.arange(32))
    with pytest.raises(MemoryFault, match="which has exited"):
        run(body.replace("SLEEP", sleep).replace("END", ""), cluster=2)


def test_completing_a_transaction_publishes_writes() -> None:
    """CUTLASS hands over the answer "no more tiles" so: expect, store, then complete the bytes itself."""
    body = (
        BARRIER
        + """
    setp.eq.u32 %p3, %r2, 40;
    @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16;
    @%p3 st.shared.u32 [%r3+512], %r2;
    @%p3 mbarrier.complete_tx.shared::cta.b64 [%r3], 16;
"""
        + WAIT
        + "ld.shared.u32 %r7, [%r3+512]; st.global.u32 [%rd3], %r7;"
    )
    np.testing.assert_array_equal(run(body, threads=64)[:64], np.full(64, 40))


def test_warps_may_share_a_word() -> None:
    """Halves of it, and bytes, are each written by another warp."""
    body = """
    shr.u32 %r6, %r2, 5;
    shl.b32 %r7, %r6, SHIFT;
    add.u32 %r8, %r3, %r7;
    st.shared.TYPE [%r8], %rs1;
    bar.sync 0;
    ld.shared.u32 %r9, [%r3];
    st.global.u32 [%rd3], %r9;
    """
    halves = ".reg .b16 %rs1;\ncvt.u16.u32 %rs1, %r2; and.b16 %rs1, %rs1, 32; ld.param.u32 %r9, [value];" + body
    assert run(halves.replace("SHIFT", "1").replace("TYPE", "u16"), threads=64)[0] == 32 << 16
    four = halves.replace("SHIFT", "0").replace("TYPE", "u8").replace("and.b16 %rs1, %rs1, 32", "mov.u16 %rs1, 3")
    assert run(four, threads=128)[0] == 0x03030303
