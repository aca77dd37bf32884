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


def mutants(body: str, instruction: str = "", executed: bool = True) -> set[tuple[str, str | None]]:
    """(rule, what stands in its place) of instructions that begin so."""
    program, _ = Device().load(MODULE.format(body=body)).program("kernel")
    blocks = [int(executed or block == 0) for block in range(len(program.blocks))]
    every = [mutation for seed in range(30) for mutation, _ in draw(program, blocks, 1000, seed)]
    return {(m.rule, m.after) for m in every if m.before.startswith(instruction)}


FLOATS = ".reg .f32 %f<8>; cvt.rn.f32.u32 %f1, %r2; cvt.rn.f32.u32 %f2, %r1; "
SUM = FLOATS + "sub.f32 %f4, %f1, %f2; "
STORE = "mov.b32 %r16, %f3; st.global.u32 [%rd3], %r16;"
FLAG = "mov.b32 %r9, 1; @%p1 bra on; mov.b32 %r9, 0; on: "
IF = " @%p2 st.global.u32 [%rd3], %r2;"


@pytest.mark.parametrize(
    ("unseen", "seen", "mutant"),
    [
        (
            SUM + "mul.f32 %f3, %f4, %f4; " + STORE,
            SUM + "mul.f32 %f3, %f4, %f1; " + STORE,
            ("swap", "sub.f32 %f4, %f2, %f1;"),
        ),
        (FLAG + "setp.ne.b32 %p2, %r9, 0;" + IF, FLAG + "st.global.u32 [%rd3], %r9;", ("shift", "mov.b32 %r9, 2;")),
        (
            "setp.eq.u32 %p2, %r2, %r1;" + IF,
            "setp.lt.u32 %p2, %r2, %r1;" + IF,
            ("swap", "setp.{}.u32 %p2, %r1, %r2;"),
        ),
        (
            "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0, 1000;" + IF,
            "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 999;" + IF,
            ("shift", "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3+0], {}1000;"),
        ),
    ],
    ids=["a difference that is squared", "a flag", "terms compared for being equal", "how long a wait may last"],
)
def test_what_comes_to_the_same_is_left_alone(unseen: str, seen: str, mutant: tuple[str, str]) -> None:
    """And what looks like it is not."""
    rule, after = mutant
    assert (rule, after.format("lt" if "setp" in after else "")) in mutants(seen)
    left = mutants(unseen)
    assert (rule, after.format("eq")) not in left
    assert not any(m[0] == rule and "1001" in str(m[1]) for m in left)


@pytest.mark.parametrize(
    ("body", "mutant"),
    [
        (
            "shfl.sync.idx.b32 %r9, %r2, 0, 31, 255; st.global.u32 [%rd3], %r9;",
            ("shift", "shfl.sync.idx.b32 %r9, %r2, 0, 31, 256;"),
        ),
        (SUM + "fma.rn.f32 %f3, %f4, %f4, %f4; " + STORE, ("swap", "sub.f32 %f4, %f2, %f1;")),
        (
            "sub.s32 %r9, %r2, %r1; mul.lo.s32 %r10, %r9, %r9; st.global.u32 [%rd3], %r10;",
            ("swap", "sub.s32 %r9, %r1, %r2;"),
        ),
        (
            "shr.s32 %r9, %r2, 31; shr.u32 %r10, %r9, 30; add.s32 %r11, %r1, %r10; st.global.u32 [%rd3], %r11;",
            ("flip", "sub.s32 %r11, %r1, %r10;"),
        ),
        (
            "shr.s32 %r9, %r2, 31; shr.u32 %r10, %r9, 30; st.global.u32 [%rd3], %r10;",
            ("flip", "shl.u32 %r10, %r9, 30;"),
        ),
        ("ld.acquire.gpu.global.u32 %r9, [%rd1]; st.global.u32 [%rd3], %r2;", ("drop", None)),
    ],
    ids=["lanes of a shuffle", "a square and itself", "integers", "the sign of another", "a sign alone", "an acquire"],
)
def test_what_can_matter_is_broken(body: str, mutant: tuple[str, str | None]) -> None:
    at = body.find("ld.acquire")
    assert mutant in mutants(body, "ld.acquire" if at >= 0 else "")


def test_what_only_unexecuted_code_reads_is_left_alone() -> None:
    body = "add.u32 %r9, %r2, 5; setp.ge.u32 %p2, %r2, 99; @!%p2 bra end; st.global.u32 [%rd3], %r9; end:"
    assert mutants(body, "add.u32 %r9")
    assert not mutants(body, "add.u32 %r9", executed=False)


def test_copies_that_unrolling_makes_count_once() -> None:
    body = " ".join(
        f"ld.global.u32 %r{9 + i}, [%rd1+{4 * i}]; st.global.u32 [%rd3+{128 * i}], %r{9 + i};" for i in range(8)
    )
    program, _ = Device().load(MODULE.format(body=body)).program("kernel")
    draws = [
        [m.before[:2] for m, _ in draw(program, [1] * len(program.blocks), 1000, seed) if m.rule == "drop"]
        for seed in range(9)
    ]
    assert 1 <= max(drawn.count("st") for drawn in draws) <= 2  # the last has other instructions around


def test_constants_change_as_what_they_are() -> None:
    text = "and.b32 %r9, %r2, 12; add.u32 %r9, %r9, 12; st.global.u32 [%rd3], %r9;"
    assert ("shift", "and.b32 %r9, %r2, 24;") in mutants(text, "and.b32 %r9")
    assert ("shift", "add.u32 %r9, %r9, 13;") in mutants(text, "add.u32 %r9, %r9, 12")
    text = FLOATS + "mul.f32 %f3, %f1, 0f40000000; " + STORE
    assert ("shift", "mul.f32 %f3, %f1, 0x40800000;") in mutants(text, "mul.f32 %f3")


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
    mutation = next(m for m, _ in draw(program, [1] * len(program.blocks), 1000, 0) if "cvt.rn" in m.before)
    other, _ = Device().load(MODULE.format(body="mov.u32 %r9, 1;" * 30)).program("kernel")
    with pytest.raises(LookupError):
        again(other, mutation)
