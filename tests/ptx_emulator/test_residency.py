"""CTAs that an SM holds at a time share its tensor memory."""

import numpy as np
import pytest

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import DeadlockError
from ptx_emulator.hand_written import MODULE


def allocating(columns: int, arrivals: int) -> str:
    """One that gives its columns back once so many CTAs have theirs."""
    return f"""
    @%p1 st.shared.u32 [%r3+4], 0;
    bar.sync 0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], {columns};
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ld.shared.u32 %r6, [%r3];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {{%r2}};
    tcgen05.wait::st.sync.aligned;
    mov.u32 %r8, %smid;
    add.u32 %r9, %r6, %r8;
    @%p1 atom.global.max.u32 %r7, [%rd1], %r9;
    @%p1 atom.global.add.u32 %r7, [%rd1+4], 1;
again:
    ld.volatile.global.u32 %r7, [%rd1+4];
    nanosleep.u32 20;
    setp.lt.u32 %p2, %r7, {arrivals};
    @%p2 bra again;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, {columns};
"""


@pytest.mark.parametrize(("columns", "arrivals", "highest"), [(256, 2, 256), (512, 1, 0)])
def test_two_blocks_on_an_sm_share_its_tensor_memory(columns: int, arrivals: int, highest: int) -> None:
    """Each has half of the columns, or one waits until the other gave them back."""
    device = Device(sm_count=1)
    device.ctas_per_sm = 2
    counts = device.upload(np.zeros(2, np.uint32))
    module = device.load(MODULE.format(body=allocating(columns, arrivals)))
    device.launch(module, "kernel", (2, 1, 1), (32, 1, 1), pack_params(counts, 0), 8192)
    np.testing.assert_array_equal(device.download(counts, np.uint32, (2,)), [highest, 2])


def test_two_blocks_on_an_sm_that_want_more_tensor_memory_than_it_has() -> None:
    """And each waits for the other."""
    device = Device(sm_count=1)
    device.ctas_per_sm = 2
    counts = device.upload(np.zeros(2, np.uint32))
    module = device.load(MODULE.format(body=allocating(512, 2)))
    with pytest.raises(DeadlockError, match="waits for 512 columns of tensor memory"):
        device.launch(module, "kernel", (2, 1, 1), (32, 1, 1), pack_params(counts, 0), 8192)
