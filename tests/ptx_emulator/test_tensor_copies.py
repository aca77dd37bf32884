"""Tensor copies issued from hand-written PTX: gathers, edited tensor maps, reductions."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import EmulatorError, ProxyFenceError
from ptx_emulator.tensor_map import ElementType, TensorMap

_MODULE = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .align 128 .b8 map[128], .param .u64 out, .param .u64 other) {{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    mov.u64 %rd1, map;
    cvta.param.u64 %rd1, %rd1;
    ld.param.u64 %rd2, [out];
    ld.param.u64 %rd3, [other];
    mov.u32 %r1, %tid.x;
    setp.eq.u32 %p1, %r1, 0;
    mov.u32 %r2, dynamic;
    add.u32 %r3, %r2, 1024;
    shl.b32 %r4, %r1, 2;
    add.u32 %r5, %r3, %r4;
    cvt.u64.u32 %rd4, %r4;
    add.u64 %rd4, %rd2, %rd4;
    mov.b32 %r6, 2;
    mov.b32 %r7, 1;
    mov.b32 %r8, 6;
    mov.b32 %r9, 9;
    mov.b32 %r10, 4;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    {body}
    ret;
}}
"""
_WAIT_AND_COPY_OUT = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra again;
    setp.lt.u32 %p3, %r1, 16;
    @%p3 ld.shared.u32 %r11, [%r5];
    @%p3 st.global.u32 [%rd4], %r11;
"""
_LOAD = """
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile{mode}.mbarrier::complete_tx::bytes
        [%r3], [{map}, {at}], [%r2];
"""


def launch(body: str, box: tuple[int, int], matrix: NDArray[np.uint32], out: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Run with a map of `matrix` as parameter and the matrix plus 1000 as `other`; returns what becomes of `out`."""
    device = Device()
    source, other = device.upload(matrix, "matrix"), device.upload(matrix + np.uint32(1000), "other matrix")
    result = device.upload(out, "result")
    rows, columns = matrix.shape
    target = result if "bulk_group" in body else source
    tensor = TensorMap(ElementType.UINT32, target.base, (columns, rows), (4 * columns,), box, (1, 1))
    params = tensor.to_bytes() + pack_params(result, other)
    device.launch(device.load(_MODULE.format(body=body)), "kernel", (1, 1, 1), (32, 1, 1), params, 4096)
    return device.download(result, np.uint32, out.shape)


@pytest.fixture
def matrix() -> NDArray[np.uint32]:
    return np.random.default_rng(5).integers(0, 2**31, (10, 8), np.uint32)


@pytest.mark.parametrize(
    ("mode", "at", "box", "rows"),
    [("", "{%r10, %r6}", (4, 4), [2, 3, 4, 5]), ("::gather4", "{%r10, %r6, %r8, %r7, %r9}", (4, 1), [2, 6, 1, 9])],
)
def test_four_rows(mode: str, at: str, box: tuple[int, int], rows: list[int], matrix: NDArray[np.uint32]) -> None:
    """Rows of a box, and rows that are gathered."""
    body = _LOAD.format(mode=mode, map="%rd1", at=at) + _WAIT_AND_COPY_OUT
    result = launch(body, box, matrix, np.zeros(16, np.uint32))
    np.testing.assert_array_equal(result.reshape(4, 4), matrix[rows, 4:8])


def test_map_edited_in_shared_memory_and_published(matrix: NDArray[np.uint32]) -> None:
    body = """
    add.u32 %r12, %r2, 2048;
    add.u32 %r13, %r12, %r4;
    add.u64 %rd5, %rd1, 0;
    cvt.u64.u32 %rd6, %r4;
    add.u64 %rd5, %rd5, %rd6;
    ld.u32 %r14, [%rd5];
    st.shared.u32 [%r13], %r14;
    bar.warp.sync -1;
    @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r12], %rd3;
    add.u64 %rd7, %rd2, 128;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd7], [%r12], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd7], 128;
"""
    body += _LOAD.format(mode="", map="%rd7", at="{%r10, %r6}") + _WAIT_AND_COPY_OUT
    result = launch(body, (4, 4), matrix, np.zeros(64, np.uint32))[:16]
    np.testing.assert_array_equal(result.reshape(4, 4), matrix[2:6, 4:8] + 1000)
    with pytest.raises(ProxyFenceError, match=r"no fence\.proxy\.tensormap::generic\.acquire"):
        launch(
            body.replace("fence.proxy.tensormap::generic.acquire.gpu [%rd7], 128;", ""),
            (4, 4),
            matrix,
            np.zeros(64, np.uint32),
        )


def test_map_edited_in_global_memory(matrix: NDArray[np.uint32]) -> None:
    """Edited in place by the launch that copies by it: the host's map at first, another's address then."""
    body = """
    add.u64 %rd7, %rd2, 128;
    add.u64 %rd5, %rd1, 0;
    cvt.u64.u32 %rd6, %r4;
    add.u64 %rd5, %rd5, %rd6;
    ld.u32 %r14, [%rd5];
    add.u64 %rd6, %rd7, %rd6;
    st.global.u32 [%rd6], %r14;
    bar.warp.sync -1;
    @%p1 tensormap.replace.tile.global_address.global.b1024.b64 [%rd7], %rd3;
    RELEASE
    ACQUIRE
"""
    body += _LOAD.format(mode="", map="%rd7", at="{%r10, %r6}") + _WAIT_AND_COPY_OUT
    acquire = "fence.proxy.tensormap::generic.acquire.gpu [%rd7], 128;"
    release = "fence.proxy.tensormap::generic.release.gpu;"

    def loaded(released: str, acquired: str) -> NDArray[np.uint32]:
        text = body.replace("RELEASE", released).replace("ACQUIRE", acquired)
        return launch(text, (4, 4), matrix, np.zeros(64, np.uint32))[:16]

    np.testing.assert_array_equal(loaded(release, acquire).reshape(4, 4), matrix[2:6, 4:8] + 1000)
    with pytest.raises(ProxyFenceError, match="release"):
        loaded("", acquire)
    with pytest.raises(ProxyFenceError, match="acquire"):
        loaded(release, "")


def test_reducing_store_drops_what_is_outside(matrix: NDArray[np.uint32]) -> None:
    body = """
    @%p1 mov.b32 %r10, 6;
    st.shared.u32 [%r5], %r1;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r10, %r6}], [%r3];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
    result = launch(body, (4, 4), matrix, matrix)
    expected = matrix.copy()
    expected[2:6, 6:8] += np.arange(16, dtype=np.uint32).reshape(4, 4)[:, :2]
    np.testing.assert_array_equal(result, expected)


def test_no_map_there() -> None:
    with pytest.raises(EmulatorError, match="encoded tensor map"):
        launch(
            _LOAD.format(mode="", map="%rd3", at="{%r10, %r6}") + _WAIT_AND_COPY_OUT,
            (4, 4),
            np.ones((10, 8), np.uint32),
            np.zeros(16, np.uint32),
        )
