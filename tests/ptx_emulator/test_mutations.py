"""What is broken in a kernel on purpose, and what cannot matter and is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator.coverage import Coverage
from ptx_emulator.device import Device, pack_params
from ptx_emulator.errors import EmulatorError
from ptx_emulator.hand_written import MODULE
from ptx_emulator.mutate import Kernel
from ptx_emulator.mutations import Mutation, Population, again, apply

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
    population = Population(program, Coverage.everything(program))
    every = [population.draw(1000, seed) for seed in range(20)]
    return list({mutation for found in every for mutation, _ in found})


def test_only_what_can_matter_is_broken() -> None:
    np.testing.assert_array_equal(run(), RESULT)
    texts = {(m.before.split(",")[0], m.rule) for m in drawn()}
    assert not {text for text, _ in texts} & {"mov.b32 %r10", "nanosleep.u32 %r10;", "mov.u32 %r11"}
    assert not {("shr.s32 %r12", "shift"), ("shr.u32 %r13", "shift"), ("add.s32 %r14", "flip")} & texts
    assert {("shr.s32 %r15", "shift"), ("add.s32 %r14", "drop"), ("mul.f32 %f2", "shift")} <= texts


def mutants(body: str, instruction: str = "", value: int | None = None) -> set[tuple[str, str | None]]:
    """(rule, what stands in its place) of instructions that begin so; of all, or of what a launch with the value
    executes."""
    device = Device()
    module = device.load(MODULE.format(body=body))
    program, compiler = module.program("kernel")
    coverage = Coverage.everything(program)
    if value is not None:
        coverage = compiler.coverage = Coverage()
        memory = device.upload(np.zeros(256, np.uint32))
        device.launch(module, "kernel", (1, 1, 1), (32, 1, 1), pack_params(memory, value), 8192)
    population = Population(program, coverage)
    every = [mutation for seed in range(30) for mutation, _ in population.draw(1000, seed)]
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


@pytest.mark.parametrize(
    ("body", "instruction", "without"),
    [
        (
            "add.u32 %r9, %r2, 5; setp.ge.u32 %p2, %r1, 99; @!%p2 bra end; st.global.u32 [%rd3], %r9; end:",
            "add.u32 %r9",
            0,
        ),
        ("setp.ge.u32 %p2, %r1, 99; add.u32 %r9, %r2, 5; @%p2 st.global.u32 [%rd3], %r9;", "add.u32 %r9", 0),
        ("setp.ge.u32 %p2, %r1, 99; @%p2 st.global.u32 [%rd3], %r2;", "@%p2 st", 0),
        (
            "setp.ge.u32 %p2, %r1, 99; mov.u32 %r9, 5; @%p2 mov.u32 %r9, %r2; st.global.u32 [%rd3], %r9;",
            "mov.u32 %r9, 5",
            99,
        ),
        (
            "mov.u32 %r9, 0; again: add.u32 %r10, %r9, 4; st.global.u32 [%rd3], %r9; mov.u32 %r9, %r10;"
            "setp.lt.u32 %p2, %r10, %r1; @%p2 bra again;",
            "mov.u32 %r9, %r10",
            0,
        ),
    ],
    ids=["behind a branch", "a guard", "the guarded", "what is always replaced", "a loop's next turn"],
)
def test_what_only_unexecuted_code_reads_is_left_alone(body: str, instruction: str, without: int) -> None:
    """And once a launch takes the other way it is not."""
    assert not mutants(body, instruction, without)
    assert mutants(body, instruction, 99 - without)
    assert mutants(body, "setp", 0)


TWINS = "@%p2 bra one; {} bra both; one: {} both: {}"


@pytest.mark.parametrize(
    ("one", "other", "after", "same"),
    [
        ("ld.global.u32 %r9, [%rd1];", "ld.global.u32 %r9, [%rd1];", "st.global.u32 [%rd3], %r9;", True),
        (
            "ld.global.L2::cache_hint.u32 %r9, [%rd1], %rd5;",
            "ld.global.u32 %r9, [%rd1];",
            "st.global.u32 [%rd3], %r9;",
            True,
        ),
        (
            "mov.u32 %r9, 5; st.global.u32 [%rd3], %r9;",
            "mov.u32 %r10, 5; st.global.u32 [%rd3], %r10;",
            "add.u32 %r1, %r2, 1;",
            True,
        ),
        ("ld.global.u32 %r9, [%rd1];", "ld.global.u32 %r9, [%rd1+4];", "st.global.u32 [%rd3], %r9;", False),
        ("mov.u32 %r9, 5;", "mov.u32 %r9, 6;", "st.global.u32 [%rd3], %r9;", False),
        ("mov.u32 %r9, 5;", "mov.u32 %r10, 5;", "st.global.u32 [%rd3], %r9;", False),
        ("mov.u32 %r9, %r2;", "mov.u32 %r9, %r1;", "st.global.u32 [%rd3], %r9;", False),
        (
            "mov.u32 %r9, 5; st.global.u32 [%rd3], %r1;",
            "mov.u32 %r1, 5; st.global.u32 [%rd3], %r1;",
            "add.u32 %r10, %r2, 1;",
            False,
        ),
        ("st.global.u32 [%rd3], %r2;", "st.global.u32 [%rd3], %r2; st.global.u32 [%rd3], %r2;", "", False),
    ],
)
def test_a_branch_between_ways_that_do_the_same(one: str, other: str, after: str, same: bool) -> None:
    found = mutants("setp.ge.u32 %p2, %r1, 9; " + TWINS.format(one, other, after))
    assert (("flip", "setp.lt.u32 %p2, %r1, 9;") in found) is not same
    assert (("flip", "@!%p2 bra one;") in found) is not same


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ("mov.u32 %r9, 7; @%p1 bra on; mov.u32 %r9, 7; on: st.global.u32 [%rd3], %r9;", True),
        ("mov.u32 %r9, 8; @%p1 bra on; mov.u32 %r9, 7; on: st.global.u32 [%rd3], %r9;", False),
        ("mov.u32 %r9, 7; add.u32 %r9, %r9, %r1; mov.u32 %r9, 7; st.global.u32 [%rd3], %r9;", False),
        (
            "mov.u32 %r9, 7; @%p1 bra on; mov.u32 %r9, 8; on: setp.ge.u32 %p2, %r2, 9; @%p2 bra end;"
            "mov.u32 %r9, 7; end: st.global.u32 [%rd3], %r9;",
            False,
        ),
        (
            "mov.u32 %r9, 7; again: st.global.u32 [%rd3], %r9; mov.u32 %r9, 7; add.u32 %r10, %r9, %r1;"
            "setp.ge.u32 %p2, %r10, 99; @%p2 bra end; mov.u32 %r9, 5; @%p1 bra again; end:",
            False,
        ),
    ],
)
def test_a_register_set_to_what_it_has(body: str, same: bool) -> None:
    """By the last `mov.u32 %r9, 7` and whatever reaches it."""
    program, _ = Device().load(MODULE.format(body=body)).program("kernel")
    population = Population(program, Coverage.everything(program))
    places = [m for seed in range(40) for m, _ in population.draw(1000, seed) if m.before.startswith("mov.u32 %r9, 7")]
    last = max((b, i) for b, block in enumerate(program.blocks) for i, item in enumerate(block.instructions)
               if item.text.startswith("mov.u32 %r9, 7"))  # fmt: skip
    assert any((m.block, m.index) == last and m.rule == "drop" for m in places) is not same


@pytest.mark.parametrize(
    ("failing", "same"), [("brkpt;", True), ("trap;", True), ("st.global.u32 [%rd3], %r2; trap;", False)]
)
def test_an_assertion(failing: str, same: bool) -> None:
    body = f"setp.lt.u32 %p2, %r1, 99; @%p2 bra holds; {failing} holds: st.global.u32 [%rd3], %r2;"
    assert bool(mutants(body, "setp.lt.u32 %p2", 0)) is not same


@pytest.mark.parametrize(
    ("value", "mask", "same"),
    [
        ("mov.u32 %r9, dynamic; shr.u32 %r10, %r9, 4;", 16383, True),  # the address in a matrix descriptor
        ("mov.u32 %r9, dynamic; add.u32 %r12, %r9, 32; shr.u32 %r10, %r12, 4;", 16383, True),
        ("mov.u32 %r9, dynamic; add.u32 %r12, %r9, 16; shr.u32 %r10, %r12, 4;", 16383, False),
        ("shl.b32 %r9, %r2, 2; add.u32 %r9, %r3, %r9; shr.u32 %r10, %r9, 4;", 16383, False),
        ("shl.b32 %r10, %r1, 1;", 0x7FFFFFFF, False),
        ("shl.b32 %r10, %r2, 4;", 0x000FFFFF, True),
        ("ld.global.u32 %r10, [%rd1];", 16383, False),
        (".reg .f32 %f<2>; cvt.rn.f32.u32 %f1, %r2; mov.b32 %r10, %f1;", 0x7FFFFFFF, False),
        (".reg .b16 %h<2>; shl.b32 %r9, %r2, 4; cvt.u16.u32 %h1, %r9; cvt.u32.u16 %r10, %h1;", 0x000FFFFF, True),
        (".reg .b16 %h<2>; shl.b32 %r9, %r2, 4; cvt.u16.u32 %h1, %r9; cvt.s32.s16 %r10, %h1;", 0x000FFFFF, False),
        ("cvt.u64.u32 %rd4, %r1; shl.b64 %rd5, %rd4, 32; mov.b64 {%r9, %r10}, %rd5;", 16383, False),
        ("shl.b32 %r10, %r2, 4; again: add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, %r1; @%p2 bra again;", 1, False),
    ],
)
def test_masks_that_let_the_same_pass(value: str, mask: int, same: bool) -> None:
    found = mutants(f"{value} and.b32 %r11, %r10, {mask}; st.global.u32 [%rd3], %r11;", "and.b32 %r11")
    assert (("shift", f"and.b32 %r11, %r10, {mask << 1 & 0xFFFFFFFF};") in found) is not same


def test_copies_that_unrolling_makes_count_once() -> None:
    body = " ".join(
        f"ld.global.u32 %r{9 + i}, [%rd1+{4 * i}]; st.global.u32 [%rd3+{128 * i}], %r{9 + i};" for i in range(8)
    )
    program, _ = Device().load(MODULE.format(body=body)).program("kernel")
    population = Population(program, Coverage.everything(program))
    draws = [
        [m.before.split(".")[0:2] for m, _ in population.draw(1000, seed) if m.rule == "drop"] for seed in range(9)
    ]
    assert (
        max(drawn.count(["st", "global"]) for drawn in draws)
        == max(drawn.count(["ld", "global"]) for drawn in draws)
        == 1
    )


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


def test_a_mutation_is_tried_by_the_tests_that_execute_it() -> None:
    coverages = []
    for value in (3, 30):
        device = Device()
        module = device.load(MODULE.format(body="setp.ge.u32 %p2, %r1, 9; @%p2 bra end; add.u32 %r9, %r1, 1; end:"))
        program, compiler = module.program("kernel")
        compiler.coverage = Coverage()
        memory = device.upload(np.zeros(256, np.uint32))
        device.launch(module, "kernel", (1, 1, 1), (32, 1, 1), pack_params(memory, value), 8192)
        coverages.append(compiler.coverage)
    (adds,) = (
        n for n, block in enumerate(program.blocks) if any(i.text.startswith("add.u32 %r9") for i in block.instructions)
    )
    tests: dict[Any, tuple[float, Coverage]] = {
        "slow": (2.0, coverages[0]),
        "another": (1.5, coverages[1]),
        "fast": (1.0, coverages[0]),
    }
    kernel = Kernel(module, Coverage.of_all(coverages), tests)
    assert kernel.tests_of(0) == ["fast", "another", "slow"]
    assert kernel.tests_of(adds) == ["fast", "slow"]
    with pytest.raises(pytest.UsageError, match=f"no test executes block {adds}, "):
        Kernel(module, coverages[1], {"another": tests["another"]}).tests_of(adds)


def test_a_mutation_of_another_program_is_refused() -> None:
    program, _ = Device().load(MODULE.format(body=BODY)).program("kernel")
    population = Population(program, Coverage.everything(program))
    mutation = next(m for m, _ in population.draw(1000, 0) if "cvt.rn" in m.before)
    other, _ = Device().load(MODULE.format(body="mov.u32 %r9, 1;" * 30)).program("kernel")
    with pytest.raises(LookupError):
        again(other, mutation)
