"""CUTLASS's NVFP4 GEMM kernels, known to be right on hardware, come out right; broken ones do not."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ptx_emulator.counters import Counters
from ptx_emulator.cutlass_gemm import Problem, compile_example
from ptx_emulator.errors import DeadlockError, EmulatorError, MemoryFault, ProxyFenceError
from ptx_emulator.ir import Instruction
from ptx_emulator.program import EXIT
from ptx_emulator.shim import TARGETS, Gpu, Program

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ONE_CTA = {"Shape<_256,_256,_256>": "Shape<_128,_128,_256>", "Shape<_2,_4,_1>": "Shape<_1,_1,_1>"}
# example, target, replaced shapes
KERNELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "79a sm_120a": ("79a", "rtx-blackwell", {}),
    "72a sm_100a one CTA": ("72a", "b200", ONE_CTA),
    "72a sm_100a two CTAs": ("72a", "b200", {}),
}


@cache
def program(kernel: str, sm_count: int | None = None) -> Program:
    example, target, replacements = KERNELS[kernel]
    chosen = TARGETS[target]
    if sm_count is not None:
        chosen = replace(chosen, sm_count=sm_count)
    return compile_example(example, Gpu(chosen), replacements)


def assert_equal(result: Any, reference: Any) -> None:
    """Equal up to the rounding to BF16 and FP32 accumulation."""
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, reference, rtol=2**-8, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("m", "n", "k", "beta"), [(128, 128, 256, 0.0), (300, 520, 352, 0.5)])
def test_matches_float64(kernel: str, m: int, n: int, k: int, beta: float) -> None:
    compiled = program(kernel)
    result, reference = Problem(m, n, k, seed=m + k).run(compiled, alpha=1.5, beta=beta)
    assert_equal(result, reference)
    counters = compiled.gpu.launches[-1].counters
    assert counters is not None
    assert sum(counters.mma_operations.values()) >= 2 * m * n * k


def test_persistent_tiles_are_claimed() -> None:
    """With fewer SMs than tiles, running CTAs take over the rest through cluster launch control."""
    compiled = program("72a sm_100a one CTA", sm_count=2)
    result, reference = Problem(384, 384, 256, seed=3).run(compiled)
    assert_equal(result, reference)
    counters = compiled.gpu.launches[-1].counters
    assert counters is not None
    claims = counters.bytes_written["shared (cluster launch control)"] // 16
    assert claims >= 9  # every tile but the first two is claimed, and each CTA is told once that none is left


def run_mutated(kernel: str, mutate: Callable[[str], str], problem: Problem, gpu_seed: int = 0) -> tuple[Any, Any]:
    example, target, replacements = KERNELS[kernel]
    gpu = Gpu(target, seed=gpu_seed)
    gpu.device.disorder = 0.15
    load = gpu.device.load

    def load_mutated(text: str) -> Any:
        changed = mutate(text)
        assert changed != text, "the mutation found nothing to change"
        return load(changed)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(gpu.device, "load", load_mutated)
    return problem.run(compile_example(example, gpu, replacements))


def drop(pattern: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"(?:@!?%?\w+ )?{pattern}[^;]*;", "", text)


def change_descriptor(bits: int) -> Callable[[str], str]:
    """Flip bits of operand A's matrix descriptor."""
    pattern = re.compile(r"(tcgen05\.mma\.[^;]*?\], )(%rd\d+)(, %rd)")
    return lambda text: pattern.sub(lambda m: f"xor.b64 {m[2]}, {m[2]}, {bits};\n{m[0]}", text)


SMALL = Problem(128, 128, 512, seed=1)
ONE, TWO = "72a sm_100a one CTA", "72a sm_100a two CTAs"


@pytest.mark.parametrize(
    ("kernel", "mutate", "error"),
    [
        (ONE, drop(r"fence\.proxy\.async"), ProxyFenceError),
        ("79a sm_120a", drop(r"fence\.proxy\.async"), ProxyFenceError),
        (ONE, drop(r"tcgen05\.commit"), DeadlockError),
        (TWO, drop(r"fence\.proxy\.async"), ProxyFenceError),
        (TWO, drop(r"tcgen05\.commit"), DeadlockError),
        (ONE, drop(r"tcgen05\.dealloc"), EmulatorError),
        (ONE, drop(r"mbarrier\.arrive\.expect_tx\.shared::cta"), (DeadlockError, MemoryFault)),
        (ONE, drop(r"tcgen05\.cp"), MemoryFault),
    ],
    ids=["fence", "fence 79a", "commit", "fence two CTAs", "commit two CTAs", "dealloc", "expect_tx", "scale copy"],
)
def test_dropped_instruction_is_reported(kernel: str, mutate: Callable[[str], str], error: Any) -> None:
    with pytest.raises(error):
        run_mutated(kernel, mutate, SMALL)


@pytest.mark.parametrize("bits", [6 << 61, 2 << 32, 1 << 3], ids=["swizzle", "stride", "address"])
def test_wrong_descriptor_gives_a_wrong_result_or_error(bits: int) -> None:
    try:
        result, reference = run_mutated(ONE, change_descriptor(bits), SMALL)
    except EmulatorError:
        return
    assert not np.allclose(result, reference, rtol=0.01)


def flip_parity(line: int) -> Callable[[str], str]:
    """Wait for the other phase in the try_wait of one line."""

    def mutate(text: str) -> str:
        lines = text.split("\n")
        parity = lines[line - 1].rstrip(" ;").split(",")[2].strip()
        flipped = lines[line - 1].replace(f", {parity}", ", flipped")
        lines[line - 1] = f".reg .b32 flipped; xor.b32 flipped, {parity}, 1; {flipped}"
        return "\n".join(lines)

    return mutate


def waits_with_consequences(launch: Counters) -> list[Instruction]:
    """The executed looping waits after which a thread may still do something.

    CUTLASS's producer tail, which only keeps a CTA from exiting before its peers, is not among them, nor are single
    peeks (no time limit operand), which may fail harmlessly.
    """
    blocks = launch.program.blocks
    effects = {"cp", "tcgen05", "st", "ld", "bar", "clusterlaunchcontrol"}
    found = []
    for number, (block, executions) in enumerate(zip(blocks, launch.block_executions, strict=True)):
        waits = [i for i in block.instructions if i.opcode[:2] == ("mbarrier", "try_wait") and len(i.operands) == 4]
        if not waits or not executions:
            continue
        reached, pending = set(), [number]
        while pending:
            current = pending.pop()
            if current != EXIT and current not in reached:
                reached.add(current)
                pending += blocks[current].successors
        if effects & {i.name for r in reached for i in blocks[r].instructions}:
            found += waits
    return found


def is_noticed(line: int, seed: int) -> bool:
    try:
        result, reference = run_mutated(ONE, flip_parity(line), SMALL, seed)
    except EmulatorError:
        return True
    return not np.allclose(result, reference, rtol=0.01)


def test_every_flipped_phase_is_noticed() -> None:
    compiled = program(ONE)
    SMALL.run(compiled)
    launch = compiled.gpu.launches[-1].counters
    assert launch is not None
    waits = waits_with_consequences(launch)
    assert len(waits) > 5
    unnoticed = []
    for item in waits:
        # A wait behind a peek runs where the peek fails, which takes luck.
        if not any(is_noticed(item.line, seed) for seed in range(6)):
            unnoticed.append(f"line {item.line}: {item.text}")
    assert not unnoticed


def test_unzeroed_scale_padding() -> None:
    result, _ = Problem(128, 128, 160, seed=2, scale_padding=0x7F).run(program(ONE))
    assert np.isnan(result).all()
