"""Hand-written PTX for the checker's tests: a kernel around a body, and pieces that bodies share."""

import numpy as np
from numpy.typing import NDArray

from ptx_emulator.device import Device, pack_params

MODULE = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .u64 pointer, .param .u32 value) {{
    .reg .pred %p<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [pointer];
    ld.param.u32 %r1, [value];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, dynamic;
    setp.eq.u32 %p1, %r2, 0;
    shl.b32 %r4, %r2, 2;
    add.u32 %r5, %r3, %r4;
    cvt.u64.u32 %rd2, %r4;
    add.u64 %rd3, %rd1, %rd2;
    {body}
    ret;
}}
"""


def run(
    body: str,
    *,
    words: int = 256,
    threads: int = 32,
    cluster: int = 1,
    strict_exit: bool = True,
    target: str = "sm_100a",
) -> NDArray[np.uint32]:
    """The words at `pointer` after the body.

    %rd1 is the pointer, %rd3 the thread's word there; %r3 is shared memory, %r5 the thread's word there.
    """
    device = Device(strict_exit=strict_exit)
    memory = device.upload(np.arange(words, dtype=np.uint32), "test buffer")
    module = device.load(MODULE.format(body=body).replace("sm_100a", target))
    shape = (cluster, 1, 1)
    device.launch(
        module, "kernel", shape, (threads, 1, 1), pack_params(memory, 0), 8192, shape if cluster > 1 else None
    )
    return device.download(memory, np.uint32, (words,))


BARRIER = """
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
WAIT = """
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra again;
"""
# 256 bytes from the buffer to shared memory at +1024, counted on the barrier at +0.
BULK_LOAD = """
    add.u32 %r6, %r3, 1024;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 256, [%r3];
"""
WRITE_AND_STORE = """
    st.shared.u32 [%r5+1024], %r2;
    {fence}
    bar.sync 0;
    add.u32 %r6, %r3, 1024;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r6], 256;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
