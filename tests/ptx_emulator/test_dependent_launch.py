"""Kernels that may start before those before them end, and what they do before griddepcontrol.wait."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import RaceError
from ptx_emulator.hand_written import MODULE

WAIT = "griddepcontrol.wait;"
STORE = "st.global.u32 [%rd3], %r2;"
LOAD = "ld.global.u32 %r7, [%rd3]; add.u32 %r7, %r7, 1; st.global.u32 [%rd3+128], %r7;"


def run(*kernels: tuple[str, bool], threads: int = 32) -> NDArray[np.uint32]:
    """The words that launches of (body, programmatic?) leave, 64 for each of two allocations."""
    device = Device()
    memory, other = device.upload(np.arange(64, dtype=np.uint32)), device.upload(np.arange(64, dtype=np.uint32))
    for body, programmatic in kernels:
        module = device.load(MODULE.format(body=body.replace("OTHER", str(other.base))))
        parameters = pack_params(memory, 0)
        device.launch(module, "kernel", (1, 1, 1), (threads, 1, 1), parameters, 8192, programmatic=programmatic)
    return np.concatenate([device.download(region, np.uint32, (64,)) for region in (memory, other)])


def test_what_an_earlier_launch_writes_is_read_after_a_wait() -> None:
    np.testing.assert_array_equal(run((STORE, False), (WAIT + LOAD, True))[32:64], np.arange(32) + 1)
    np.testing.assert_array_equal(run((STORE, False), (LOAD, False))[32:64], np.arange(32) + 1)
    with pytest.raises(RaceError, match=r"reads .* which an earlier launch writes, before griddepcontrol\.wait"):
        run((STORE, False), (LOAD, True))
    with pytest.raises(RaceError, match="which an earlier launch writes"):
        run((STORE, False), (LOAD + WAIT, True))


def test_what_an_earlier_launch_reads_is_written_after_a_wait() -> None:
    run((LOAD, False), (WAIT + STORE, True))
    with pytest.raises(RaceError, match=r"writes .* which an earlier launch reads"):
        run((LOAD, False), (STORE, True))


def test_what_no_earlier_launch_writes_may_be_read_at_once() -> None:
    weights = "mov.u64 %rd4, OTHER; ld.global.u32 %r7, [%rd4];"
    run((STORE, False), (weights + WAIT + LOAD, True))
    run((weights, False), (weights + WAIT + LOAD, True))


def test_one_warp_waits_for_others_that_it_meets_at_a_barrier() -> None:
    one = "setp.ge.u32 %p2, %r2, 32; @%p2 bra met;" + WAIT + "met:"
    tail = "ld.global.u32 %r7, [%rd1];"
    run((STORE, False), (one + "bar.sync 0;" + tail, True), threads=64)
    with pytest.raises(RaceError, match="which an earlier launch writes"):
        run((STORE, False), (one + tail, True), threads=64)


def test_a_launch_that_did_not_wait_does_not_vouch_for_the_one_before() -> None:
    nothing = "mov.u32 %r8, 0;"
    run((STORE, False), (WAIT, True), (WAIT + LOAD, True))
    trigger = "griddepcontrol.launch_dependents;"
    run((STORE, False), (WAIT + trigger, True), (LOAD, True))
    for launches in ([(nothing, True), (WAIT + LOAD, True)], [(trigger + WAIT, True), (LOAD, True)]):
        with pytest.raises(RaceError, match="which an earlier launch writes"):
            run((STORE, False), *launches)
    run((STORE, False), (nothing, True), (WAIT, False), (LOAD, True))


def test_flags_may_be_polled() -> None:
    for poll in ("ld.relaxed.gpu.global.u32 %r7, [%rd3];", "atom.global.add.u32 %r7, [%rd3], 1;"):
        run((STORE, False), (poll + WAIT, True))
