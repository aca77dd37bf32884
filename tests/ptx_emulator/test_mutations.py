"""What is broken in a kernel on purpose, and what cannot matter and is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import EmulatorError
from ptx_emulator.hand_written import MODULE
from ptx_emulator.mutations import Mutation, again, apply, draw

BODY = """
    mov.b32 %r10, 100;
    nanosleep.u32 %r10;
    mov.u32 %r11, %laneid;
    shr.s32 %r12, %r2, 31;
    shr.u32 %r13, %r12, 30;
    add.s32 %r14, %r2, %r13;
    shr.s32 %r15, %r14, 2;
    .reg .f32 %f<4>;
    cvt.rn.f32.u32 %f1, %r15;
    mul.f32 %f2, %f1, 0f3F000000;
    mov.b32 %r16, %f2;
    st.global.u32 [%rd3], %r16;
"""
RESULT = (np.arange(32) // 4 * 0.5).astype(np.float32)


def run(mutate: Mutation | None = None) -> np.ndarray:
    device = Device()
    module = device.load(MODULE.format(body=BODY))
    memory = device.upload(np.zeros(32, np.float32))
    program, _ = module.program("kernel")
    if mutate is not None:
        apply(module, mutate, again(program, mutate))
    device.launch(module, "kernel", (1, 1, 1), (32, 1, 1), pack_params(memory, 0), 8192)
    return device.download(memory, np.float32, (32,))


def drawn() -> list[Mutation]:
    program, _ = Device().load(MODULE.format(body=BODY)).program("kernel")
    every = [draw(program, [1] * len(program.blocks), 1000, seed) for seed in range(20)]
    return list({mutation for found in every for mutation, _ in found})


def test_only_what_can_matter_is_broken() -> None:
    np.testing.assert_array_equal(run(), RESULT)
    texts = {(m.before.split(",")[0], m.rule) for m in drawn()}
    assert not {text for text, _ in texts} & {"mov.b32 %r10", "nanosleep.u32 %r10;", "mov.u32 %r11"}
    assert not {("shr.s32 %r12", "shift"), ("shr.u32 %r13", "shift"), ("add.s32 %r14", "flip")} & texts
    assert {("shr.s32 %r15", "shift"), ("add.s32 %r14", "drop"), ("mul.f32 %f2", "shift")} <= texts


def test_every_mutation_shows() -> None:
    mutations = drawn()
    assert len(mutations) > 20
    for mutation in mutations:
        try:
            result = run(mutation)
        except EmulatorError:
            continue
        # What the module does beside the body is not looked at: its barrier address and predicate.
        if not mutation.before.startswith(("mov.u32 %r3", "add.u32 %r5", "setp", "ld.param.u32")):
            assert not np.array_equal(result, RESULT), mutation


def test_a_mutation_of_another_program_is_refused() -> None:
    program, _ = Device().load(MODULE.format(body=BODY)).program("kernel")
    (mutation, _), *_ = draw(program, [1] * len(program.blocks), 1, 0)
    other, _ = Device().load(MODULE.format(body="mov.u32 %r9, 1;" * 30)).program("kernel")
    with pytest.raises(LookupError):
        again(other, mutation)
