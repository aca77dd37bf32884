"""Launches that CUDA refuses, instructions that an architecture lacks, descriptors with reserved bits."""

from typing import Any

import numpy as np
import pytest

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import DeadlockError, EmulatorError, UnknownInstructionError
from ptx_emulator.matrix_descriptor import MatrixDescriptor
from ptx_emulator.tcgen05 import InstructionDescriptor

_KERNEL = """
.version 9.0
.target {target}
.address_size 64
.visible .entry kernel(.param .u64 pointer) {directives}
{{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [pointer];
    {body}
    ret;
}}
"""
# The size of its cluster at each CTA's place.
WRITE_SIZE = """
    mov.u32 %r1, %cluster_nctarank;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r1;
"""


def launch(
    grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int, int] = (32, 1, 1), directives: str = "",
    body: str = "", target: str = "sm_100a", sm_count: int = 32, seed: int = 0, **options: Any,
) -> list[int]:  # fmt: skip
    device = Device(sm_count=sm_count, seed=seed)
    memory = device.upload(np.zeros(64, np.uint32))
    module = device.load(_KERNEL.format(target=target, directives=directives, body=body))
    device.launch(module, "kernel", grid, block, pack_params(memory), **options)
    return [int(word) for word in device.download(memory, np.uint32, (64,))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1, 1, 65)}, "along z"),
        ({"block": (1025, 1, 1)}, "1025 threads"),
        ({"grid": (1, 65536, 1)}, "not within"),
        ({"grid": (1, 1, 65536)}, "not within"),
        ({"directives": ".reqntid 64, 1, 1"}, r"\.reqntid"),
        ({"directives": ".maxntid 16, 1, 1"}, "allows 16"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "no multiple"),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, "NonPortableClusterSizeAllowed"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1), "non_portable": True}, "allow 16"),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1), "non_portable": True, "target": "sm_120a"}, "allow 8"),
        ({"grid": (2, 1, 1), "cluster": (2, 1, 1), "target": "sm_80"}, "allow 1"),
        ({"grid": (4, 1, 1), "cluster": (4, 1, 1), "directives": ".maxclusterrank 2"}, "allow 2"),
        ({"grid": (4, 1, 1), "cluster": (4, 1, 1), "directives": ".reqnctapercluster 2, 1, 1"}, "reqnctapercluster"),
        ({"grid": (4, 1, 1), "cluster": (4, 1, 1), "sm_count": 2}, "2 SMs"),
    ],
)
def test_launches_that_cuda_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        launch(**options)


def test_large_clusters_where_the_kernel_allows_them() -> None:
    assert launch((16, 1, 1), cluster=(16, 1, 1), non_portable=True, body=WRITE_SIZE)[:16] == [16] * 16


def test_preferred_clusters_are_taken_or_not() -> None:
    """Of a grid of eight: two of four CTAs, or two of two in the place of one; the last two CTAs have no choice."""
    seen = set()
    for seed in range(12):
        options: dict[str, Any] = {"cluster": (2, 1, 1), "preferred_cluster": (4, 1, 1), "seed": seed}
        sizes = launch((10, 1, 1), body=WRITE_SIZE, **options)[:10]
        assert sizes[8:] == [2, 2]
        assert all(len(set(sizes[i : i + 4])) == 1 for i in (0, 4))
        seen |= {sizes[0], sizes[4]}
    assert seen == {2, 4}
    too_large: dict[str, Any] = {"cluster": (1, 1, 1), "preferred_cluster": (4, 1, 1), "sm_count": 2}
    assert all(launch((4, 1, 1), body=WRITE_SIZE, seed=seed, **too_large)[:4] == [1] * 4 for seed in range(6))


@pytest.mark.parametrize(
    ("body", "runs_on", "missing_on"),
    [
        (
            "tcgen05.fence::before_thread_sync;",
            ["sm_100a", "sm_100f", "sm_103a", "sm_110a"],
            ["sm_120a", "sm_120f", "sm_90a", "sm_100"],
        ),
        ("wgmma.fence.sync.aligned;", ["sm_90a"], ["sm_100a", "sm_120a", "sm_90"]),
        ("setmaxnreg.inc.sync.aligned.u32 256;", [], ["sm_80", "sm_89"]),
        ("cp.async.wait_all;", ["sm_80", "sm_120a"], ["sm_75"]),
        ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", ["sm_90", "sm_120a"], ["sm_89"]),
        ("cvt.rn.satfinite.e2m1x2.f32 %b1, 0f00000000, 0f00000000;", [], ["sm_90a", "sm_100"]),
    ],
)
def test_instructions_of_an_architecture(body: str, runs_on: list[str], missing_on: list[str]) -> None:
    for target in runs_on:
        launch(body=body, target=target)
    for target in missing_on:
        with pytest.raises(UnknownInstructionError, match="no such instruction"):
            launch(body=f".reg .b8 %b1;\n{body}", target=target)


def test_multicast_is_not_for_sm120() -> None:
    body = """
    .shared .align 128 .b8 space[256];
    .reg .b16 %h1;
    mov.u32 %r1, space;
    mov.u16 %h1, 1;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd1], 16, [%r1], %h1;
    """
    with pytest.raises(UnknownInstructionError, match="no such instruction"):
        launch(body=body, target="sm_120a")


def test_tcgen05_instructions_name_one_group() -> None:
    body = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    launch(body=body)
    with pytest.raises(EmulatorError, match=r"same \.cta_group"):
        launch(body=body + body.replace("group::1", "group::2"))


def test_both_blocks_of_a_pair_allocate() -> None:
    body = """
    .shared .align 16 .b8 space[16];
    mov.u32 %r3, space;
    mov.u32 %r1, %cluster_ctarank;
    setp.lt.u32 %p1, %r1, {ranks};
    @!%p1 bra done;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r3], 32;
    ld.shared.u32 %r4, [%r3];
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, 32;
done:
    """
    launch((2, 1, 1), cluster=(2, 1, 1), body=body.format(ranks=2))
    with pytest.raises(DeadlockError, match=r"waits for CTA \(1, 0, 0\)"):
        launch((2, 1, 1), cluster=(2, 1, 1), body=body.format(ranks=1))


def test_no_cluster_is_asked_for_after_a_failure_was_seen() -> None:
    ask = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r4], [%r3];
again{n}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], {n};
    @!%p2 bra again{n};
    ld.shared.b128 %q1, [%r4];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
    """
    start = """
    .shared .align 16 .b8 space[64];
    .reg .b128 %q1;
    mov.u32 %r3, space;
    add.u32 %r4, %r3, 16;
    mov.u32 %r5, %tid.x;
    setp.eq.u32 %p1, %r5, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    """
    launch(body=start + ask.format(n=0))
    with pytest.raises(EmulatorError, match="after a failure"):
        launch(body=start + ask.format(n=0) + "fence.proxy.async.shared::cta;" + ask.format(n=1))


def test_reserved_bits_of_descriptors() -> None:
    plain, mxf4 = 128 >> 4 << 24 | 64 >> 3 << 17 | 1 << 4, 128 >> 4 << 24 | 64 >> 3 << 17 | 1 << 7 | 1 << 10
    InstructionDescriptor.decode(plain, "f16")
    InstructionDescriptor.decode(mxf4, "mxf4nvf4")
    for value, kind, bits in ((plain, "f16", (0, 1, 6, 23, 29)), (mxf4, "mxf4nvf4", (0, 1, 3, 6, 12, 15, 24, 26))):
        for bit in bits:
            with pytest.raises(EmulatorError, match="reserved bits"):
                InstructionDescriptor.decode(value | 1 << bit, kind)
    matrix = 1 << 46 | 2 << 61 | 1024 >> 4
    MatrixDescriptor.tcgen05(matrix)
    for value in (matrix | 1 << 14, matrix | 1 << 31):
        with pytest.raises(EmulatorError, match="must be zero"):
            MatrixDescriptor.tcgen05(value)
    with pytest.raises(EmulatorError, match="must be zero"):
        MatrixDescriptor.wgmma(1 << 62 | 1 << 46)


@pytest.mark.parametrize("start", [1024, 1536, 2048 + 32])
def test_a_swizzled_operand_may_start_anywhere_in_its_pattern(start: int) -> None:
    """The pattern lies at multiples of 1024 bytes; one that lies elsewhere would need a base offset."""
    tcgen05, wgmma = 1 << 46 | 2 << 61 | 64 << 32 | start >> 4, 1 << 62 | 64 << 32 | start >> 4
    row, chunk = np.mgrid[:16, :2]
    address = start + row // 8 * 1024 + row % 8 * 128 + chunk * 16
    expected = address ^ (address >> 7 & 7) << 4
    for descriptor in (MatrixDescriptor.tcgen05(tcgen05), MatrixDescriptor.wgmma(wgmma)):
        np.testing.assert_array_equal(descriptor.k_major(16, 2), expected)
    for decode, value in ((MatrixDescriptor.tcgen05, tcgen05), (MatrixDescriptor.wgmma, wgmma)):
        with pytest.raises(UnknownInstructionError, match="base offset"):
            decode(value | 4 << 49)
