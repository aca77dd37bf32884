"""Hand-written PTX that is wrong in one way each: the checker says which."""

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import (
    DeadlockError,
    EmulatorError,
    MemoryFault,
    ProxyFenceError,
    RaceError,
    UnknownInstructionError,
)
from ptx_emulator.hand_written import BARRIER, BULK_LOAD, MODULE, WAIT, WRITE_AND_STORE, run


def test_bulk_load_waited_for() -> None:
    result = run(
        BARRIER + BULK_LOAD + WAIT + "ld.shared.u32 %r7, [%r5+1024]; add.u32 %r7, %r7, 5; st.global.u32 [%rd3], %r7;"
    )
    np.testing.assert_array_equal(result[:32], np.arange(32) + 5)


def test_bulk_load_not_waited_for() -> None:
    with pytest.raises(MemoryFault, match="uninitialised shared memory"):
        run(BARRIER + BULK_LOAD + "ld.shared.u32 %r7, [%r5+1024]; st.global.u32 [%rd3], %r7;")


def test_exit_with_a_pending_copy() -> None:
    with pytest.raises(EmulatorError, match="exits with a pending operation"):
        run(BARRIER + BULK_LOAD)
    run(BARRIER + BULK_LOAD, strict_exit=False)


def test_proxy_fence() -> None:
    result = run(WRITE_AND_STORE.format(fence="fence.proxy.async.shared::cta;"), threads=64)
    np.testing.assert_array_equal(result[:64], np.arange(64))


@pytest.mark.parametrize(
    "fence",
    ["", "@%p1 fence.proxy.async.shared::cta;", "fence.proxy.async.global;"],
    ids=["none", "before the other warp's writes are seen", "other space"],
)
def test_missing_proxy_fence(fence: str) -> None:
    with pytest.raises(ProxyFenceError, match=r"fence\.proxy\.async"):
        run(WRITE_AND_STORE.format(fence=fence), threads=64)


def test_fence_by_the_reader_after_a_barrier() -> None:
    """Any proxy fence on the causality path will do: here the issuing thread's own."""
    body = WRITE_AND_STORE.format(fence="").replace("bar.sync 0;", "bar.sync 0; @%p1 fence.proxy.async.shared::cta;")
    np.testing.assert_array_equal(run(body, threads=64)[:64], np.arange(64))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.shared.u32 %r7, [%r5]; st.global.u32 [%rd3], %r7;", "uninitialised shared memory"),
        ("st.global.u32 [%rd3+1024], %r2;", "outside test buffer|lies in no allocation"),
        ("st.global.u32 [%rd3+2], %r2;", "misaligned write of 4 bytes"),
        ("ld.shared.u32 %r7, [%r5+8190]; st.global.u32 [%rd3], %r7;", "outside shared memory|misaligned"),
        ("st.shared.u32 [%r5+8192], %r2;", "outside shared memory"),
        ("mov.u64 %rd4, 64; ld.global.u32 %r7, [%rd4]; st.global.u32 [%rd3], %r7;", "lies in no allocation"),
        ("cvta.param.u64 %rd4, pointer; st.global.u32 [%rd4], %r2;", "read-only kernel parameters"),
    ],
)
def test_memory_faults_name_the_place(body: str, message: str) -> None:
    with pytest.raises(MemoryFault, match=message) as caught:
        run(body)
    assert "line " in str(caught.value)
    assert "CTA (0, 0, 0) warp 0" in str(caught.value)


def test_arrival_overflow() -> None:
    with pytest.raises(EmulatorError, match="arrival count overflow"):
        run(BARRIER.replace("], 1", "], 3") + "mbarrier.arrive.shared::cta.b64 _, [%r3], 5;")


def test_uninitialised_mbarrier() -> None:
    with pytest.raises(EmulatorError, match="no mbarrier was initialised"):
        run("mbarrier.arrive.shared::cta.b64 _, [%r3];")


def test_deadlock_report_says_who_waits_for_what() -> None:
    with pytest.raises(DeadlockError) as caught:
        run(BARRIER.replace("], 1", "], 2") + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];" + WAIT)
    assert "phase 0 (parity 0), 1 of 2 arrivals pending" in str(caught.value)
    with pytest.raises(DeadlockError, match=r"barrier 3 .*: 32 of 96 threads arrived"):
        run("bar.sync 3, 96;")


def test_deadlock_of_a_spinning_thread() -> None:
    with pytest.raises(DeadlockError, match="spins"):
        run("spin: ld.global.u32 %r7, [%rd1]; setp.eq.u32 %p2, %r7, 0; @%p2 bra spin;")


def test_registers_move_within_what_the_block_was_launched_with() -> None:
    body = "setp.lt.u32 %p2, %r2, 256; @!%p2 bra give; setmaxnreg.inc.sync.aligned.u32 {taken}; bra done; "
    body += "give: setmaxnreg.dec.sync.aligned.u32 96; done:"
    run(body.format(taken=160), threads=512)
    with pytest.raises(DeadlockError, match="registers, it was launched with 65536"):
        run(body.format(taken=168), threads=512)
    with pytest.raises(DeadlockError, match=r"setmaxnreg: .* registers"):  # nobody gives any
        run(body.format(taken=160).replace("setmaxnreg.dec.sync.aligned.u32 96;", ""), threads=512)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("setmaxnreg.dec.sync.aligned.u32 100;", "multiple of 8"),
        ("setmaxnreg.dec.sync.aligned.u32 16;", "multiple of 8"),
        ("setmaxnreg.inc.sync.aligned.u32 64;", "the warp has 128 registers"),
        ("setp.ge.u32 %p2, %r2, 32; @%p2 setmaxnreg.dec.sync.aligned.u32 96;", r"ran \[0, 1, 1, 1\] times"),
        ("setp.ge.u32 %p2, %r2, 32; @%p2 bra more; setmaxnreg.dec.sync.aligned.u32 96; bra done; "
         "more: setmaxnreg.dec.sync.aligned.u32 88; done:", "of its warpgroup"),
    ],
)  # fmt: skip
def test_rules_of_moving_registers(body: str, what: str) -> None:
    with pytest.raises(EmulatorError, match=what):
        run(body, threads=512)


def test_spinning_thread_is_released_by_another() -> None:
    body = """
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra producer;
spin:
    ld.acquire.gpu.global.u32 %r7, [%rd1+128];
    setp.eq.u32 %p3, %r7, 32;
    @%p3 bra spin;
    st.global.u32 [%rd3], %r7;
    bra done;
producer:
    setp.eq.u32 %p4, %r2, 40;
    mov.u32 %r8, 77;
    @%p4 st.release.gpu.global.u32 [%rd1+128], %r8;
done:
"""
    np.testing.assert_array_equal(run(body, threads=64)[:32], np.full(32, 77))


def test_barrier_within_diverged_warp() -> None:
    """Halves of a warp reach bar.warp.sync on different paths."""
    body = """
    setp.lt.u32 %p2, %r2, 13;
    @%p2 bra small;
    st.shared.u32 [%r5], %r2;
    bar.warp.sync -1;
    bra after;
small:
    st.shared.u32 [%r5], %r2;
    bar.warp.sync -1;
after:
    xor.b32 %r6, %r4, 124;
    add.u32 %r6, %r3, %r6;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%rd3], %r7;
"""
    np.testing.assert_array_equal(run(body)[:32], np.arange(32)[::-1])


@pytest.mark.parametrize(
    "body", ["bar.warp.sync 0;", "elect.sync %r6|%p2, 0x7fffffff;", "shfl.sync.idx.b32 %r6, %r2, 0, 31, %r2;"]
)
def test_masks_name_the_lanes_that_run_a_collective(body: str) -> None:
    with pytest.raises(EmulatorError, match="names only some"):
        run(body)


ALLOCATE = """
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
    ld.shared.u32 %r6, [%r3];
"""


def test_tensor_memory_round_trip_and_leak() -> None:
    body = (
        ALLOCATE
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r4};\ntcgen05.wait::st.sync.aligned;\n"
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r6];\ntcgen05.wait::ld.sync.aligned;\n"
        + "st.global.u32 [%rd3], %r7;\n"
    )
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;"
    np.testing.assert_array_equal(run(body + free)[:32], 4 * np.arange(32))
    with pytest.raises(EmulatorError, match="exits with tensor memory allocated"):
        run(body)
    with pytest.raises(MemoryFault, match=r"not allocated|outside"):
        run(body.replace("[%r6], {%r4}", "[%r6+64], {%r4}") + free)


def test_stores_to_tensor_memory_are_seen_by_their_warp_in_order_and_by_others_after_a_wait() -> None:
    body = """
        setp.lt.u32 %p2, %r2, 32;
        @!%p2 bra other;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
        ld.shared.u32 %r6, [%r3];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r4};
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r6];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r2};
        tcgen05.wait::st.sync.aligned;
        st.global.u32 [%rd3], %r7;
    other:
        bar.sync 0;
        setp.lt.u32 %p3, %r2, 128;
        @%p3 bra done;
        ld.shared.u32 %r6, [%r3];
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r6];
        st.global.u32 [%rd3], %r7;
    done:
        bar.sync 0;
        @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
    """
    words = run(body, threads=160)
    np.testing.assert_array_equal(words[:32], 4 * np.arange(32))  # what the first store wrote, which no wait followed
    np.testing.assert_array_equal(words[128:160], np.arange(32))
    with pytest.raises(RaceError, match=r"tcgen05\.st of warp 0 wrote"):  # the second may not have arrived
        run(body.replace("tcgen05.wait::st.sync.aligned;", ""), threads=160)


@pytest.mark.parametrize(
    "text", ["frobnicate.u32 %r7, %r2;", "add.rz.f64 %rd4, %rd4, %rd4;", "cvt.rs.f16x2.f32 %r7, %r2, %r2, %r2;"]
)
def test_unknown_instructions_stop_with_text_and_line(text: str) -> None:
    with pytest.raises(UnknownInstructionError) as caught:
        run(text)
    assert text in str(caught.value)
    assert "line 19:" in str(caught.value)


def test_multicast_reaches_every_cta() -> None:
    body = (
        """
    mov.u32 %r8, %cluster_ctarank;
    setp.eq.and.u32 %p3, %r8, 0, %p1;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
    add.u32 %r6, %r3, 1024;
    .reg .b16 %mask;
    mov.u16 %mask, 3;
    @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r6], [%rd1], 256, [%r3], %mask;
"""
        + WAIT
        + """
    ld.shared.u32 %r7, [%r5+1024];
    shl.b32 %r9, %r8, 7;
    cvt.u64.u32 %rd4, %r9;
    add.u64 %rd5, %rd3, %rd4;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    add.u32 %r7, %r7, 100;
    st.global.u32 [%rd5], %r7;
"""
    )
    np.testing.assert_array_equal(run(body, cluster=2)[:64], np.tile(np.arange(32), 2) + 100)


def test_counters_are_json() -> None:
    device = Device()
    memory = device.upload(np.zeros(32, np.uint32))
    module = device.load(MODULE.format(body="st.shared.u32 [%r5], %r2; bar.sync 0; st.global.u32 [%rd3], %r2;"))
    counters = json.loads(
        device.launch(module, "kernel", (2, 1, 1), (32, 1, 1), pack_params(memory, 0), 8192).to_json()
    )
    assert counters["instructions"]["st"] == 4
    assert counters["bytes_written"] == {"shared": 256, "global": 256}
    assert counters["barrier_waits"] == {"bar": 2}


def test_shuffle_from_an_inactive_lane_is_undefined() -> None:
    body = """
    setp.lt.u32 %p2, %r2, 8;
    @%p2 shfl.sync.down.b32 %r7, %r2, 4, 31, 255;
    @%p2 st.global.u32 [%rd3], %r7;
"""
    result = run(body)
    np.testing.assert_array_equal(result[:4], [4, 5, 6, 7])
    assert not np.isin(result[4:8], np.arange(32)).any()


@pytest.mark.parametrize("diverged", [False, True])
def test_a_value_keeps_its_bits_where_a_guard_is_false(diverged: bool) -> None:
    """Of a register that only one block knows, as a float and as an integer, by whole warps and by parts."""
    skip = "setp.ge.u32 %p3, %r2, 16;\n@%p3 bra DONE;\n" if diverged else ""
    result = run(
        f"""{skip}cvt.rn.f32.u32 %r6, %r2;
        setp.lt.u32 %p2, %r2, 8;
        setp.gt.u32 %p4, %r2, 99;
        @%p2 add.f32 %r6, %r6, %r6;
        @%p4 mov.b32 %r6, 7;
        add.u32 %r7, %r6, 1;
        st.global.u32 [%rd3], %r7;
        DONE:"""
    )
    lanes = np.arange(16 if diverged else 32, dtype=np.float32)
    expected = np.where(lanes < 8, 2 * lanes, lanes).astype(np.float32).view(np.uint32) + 1
    np.testing.assert_array_equal(result[: len(lanes)], expected)
    np.testing.assert_array_equal(result[len(lanes) : 32], np.arange(len(lanes), 32))


def test_what_a_launch_may_be_allowed() -> None:
    def words(body: str, *tolerated: str) -> NDArray[np.uint32]:
        device = Device()
        device.tolerated = frozenset(tolerated)
        memory = device.upload(np.arange(64, dtype=np.uint32))
        module = device.load(MODULE.format(body=body))
        device.launch(module, "kernel", (1, 1, 1), (32, 1, 1), pack_params(memory, 0), 8192)
        return device.download(memory, np.uint32, (64,))

    unwritten = "ld.shared.u32 %r7, [%r5]; st.global.u32 [%rd3], %r2;"
    np.testing.assert_array_equal(words(unwritten, "uninitialised")[:32], np.arange(32))
    with pytest.raises(MemoryFault, match="uninitialised"):
        words(unwritten, "unfenced-cp-async")
    copied = """
    add.u32 %r6, %r5, 1024;
    cp.async.ca.shared.global [%r6], [%rd3], 4;
    cp.async.wait_all;
    bar.sync 0;
    add.u32 %r6, %r3, 1024;
    add.u64 %rd4, %rd1, 128;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r6], 128;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
    np.testing.assert_array_equal(words(copied, "unfenced-cp-async")[32:], np.arange(32))
    with pytest.raises(ProxyFenceError):
        words(copied, "uninitialised")
