"""What hardware may do at any time: kernels that count on luck fail by some seed, those that do not pass by all."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import DeadlockError, EmulatorError
from ptx_emulator.hand_written import BARRIER, MODULE

SEEDS = range(20)


def outcomes(body: str, right: Callable[[NDArray[np.uint32]], bool], threads: int, disorder: float) -> set[str]:
    """Of runs by all seeds: "right", "wrong" or the error's name."""
    found = set()
    for seed in SEEDS:
        device = Device(seed=seed, disorder=disorder)
        memory = device.upload(np.arange(256, dtype=np.uint32), "test buffer")
        try:
            device.launch(
                device.load(MODULE.format(body=body)),
                "kernel",
                (1, 1, 1),
                (threads, 1, 1),
                pack_params(memory, 0),
                8192,
            )
        except EmulatorError as error:
            found.add(type(error).__name__)
        else:
            found.add("right" if right(device.download(memory, np.uint32, (256,))) else "wrong")
    return found


# Warp 0 writes what warp 1 has yet to read behind their meeting; in global memory, where no checker looks.
OVERWRITE = """
    bar.sync 0;
    setp.lt.u32 %p2, %r2, 32;
    @%p2 bra writer;
    ld.global.u32 %r7, [%rd1+512];
    st.global.u32 [%rd3], %r7;
    {meeting}
    bra done;
writer:
    {meeting}
    st.global.u32 [%rd1+512], %r2;
done:
"""


def test_slow_warps() -> None:
    def first_saw_the_old(words: NDArray[np.uint32]) -> bool:
        return bool((words[32:64] == 128).all())

    unordered = OVERWRITE.format(meeting="")
    assert outcomes(unordered, first_saw_the_old, 64, 0.0) == {"right"}  # by luck
    assert outcomes(unordered, first_saw_the_old, 64, 0.3) == {"right", "wrong"}
    ordered = OVERWRITE.format(meeting="bar.sync 1, 64;")
    assert outcomes(ordered, first_saw_the_old, 64, 0.3) == {"right"}


# A peek, and where it fails the wait for a phase, as CUTLASS's pipelines have it.
PEEK = (
    BARRIER
    + """
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @%p2 bra over;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], {parity};
    @!%p3 bra again;
over:
    st.global.u32 [%rd3], 7;
"""
)


def test_peeks_that_fail() -> None:
    def all_wrote(words: NDArray[np.uint32]) -> bool:
        return bool((words[:64] == 7).all())

    assert outcomes(PEEK.format(parity=0), all_wrote, 64, 0.3) == {"right"}
    assert outcomes(PEEK.format(parity=1), all_wrote, 64, 0.0) == {"right"}  # the wait never runs
    assert DeadlockError.__name__ in outcomes(PEEK.format(parity=1), all_wrote, 64, 0.3)


# Warp 1 takes word 0 for a sign that all of a store has landed.
FLAG = """
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra second;
    @%p1 st.relaxed.gpu.global.v2.u32 [%rd1], {{%r5, %r5}};
    bra done;
second:
    ld.relaxed.gpu.global.u32 %r7, [%rd1];
    setp.eq.u32 %p3, %r7, 0;
    @%p3 bra second;
    ld.relaxed.gpu.global.u32 %r8, [%rd1+{read}];
    st.global.u32 [%rd3], %r8;
done:
"""


def test_words_of_a_store_land_one_after_another() -> None:
    def new(words: NDArray[np.uint32]) -> bool:
        return bool((words[32:64] != 1).all())

    assert outcomes(FLAG.format(read=0), new, 64, 0.5) == {"right"}
    assert outcomes(FLAG.format(read=4), new, 64, 0.0) == {"right"}  # in one piece, by luck
    assert "wrong" in outcomes(FLAG.format(read=4), new, 64, 0.9)


# Each thread overwrites a word behind the issue of its copy.
COPY = """
    cp.async.ca.shared.global [%r5], [%rd3], 4;
    {wait}
    st.global.u32 [%rd3], 777;
    cp.async.wait_all;
    ld.shared.u32 %r8, [%r5];
    st.global.u32 [%rd3], %r8;
"""


def test_copies_read_early_or_late() -> None:
    def copied_the_old(words: NDArray[np.uint32]) -> bool:
        return bool((words[:32] == np.arange(32)).all())

    body = COPY.format(wait="")
    assert outcomes(body, copied_the_old, 32, 0.0) == {"wrong"}
    assert outcomes(body, copied_the_old, 32, 0.3) == {"right", "wrong"}
    waited = COPY.format(wait="cp.async.wait_all;")
    assert outcomes(waited, copied_the_old, 32, 0.3) == {"right"}
