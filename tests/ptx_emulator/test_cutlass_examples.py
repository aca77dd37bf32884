"""CUTLASS's examples, whole and unmodified: each checks its own result against its own reference, and says so."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim.toolkit import cutlass_includes, find_toolkit

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ALL = "TRT_NVFP4_CUTLASS_EXAMPLES"


@dataclass(frozen=True)
class Example:
    """Of a file of CUTLASS's examples: the GPU it is for, arguments for a problem of few tiles, how many results it
    checks, the emulator's options, and a file of problem sizes where it wants one."""

    source: str
    target: str
    arguments: str
    results: int = 1
    options: str = "--sms=8"
    groups: str | None = None


# Each compiles for one to four minutes. Nightly runs take what this project's kernels are made of and test_cutlass.py
# does not run: wgmma in FP8, NVFP4 outputs.
HOPPER_FP8, NVFP4_OUTPUT = (
    Example(
        "54_hopper_fp8_warp_specialized_gemm/54_hopper_fp8_warp_specialized_gemm.cu", "h200", "--m=256 --n=256 --k=128"
    ),
    Example("72_blackwell_narrow_precision_gemm/72b_blackwell_nvfp4_nvfp4_gemm.cu", "b200", "--m=256 --n=256 --k=256"),
)
_BLOCKWISE = "67_hopper_fp8_warp_specialized_gemm_with_blockwise_scaling"
_STREAM_K = "74_blackwell_gemm_streamk/blackwell_gemm_streamk.cu"
_MIXED = "55_hopper_mixed_dtype_gemm/55_hopper_mixed_dtype_gemm.cu"
_GEFORCE = "87_blackwell_geforce_gemm_blockwise/87a_blackwell_geforce_fp8_bf16_gemm_blockwise.cu"
_GROUPS = "0 128x16x128\n1 128x32x128\n"
OTHERS = {
    "48": Example(
        "48_hopper_warp_specialized_gemm/48_hopper_warp_specialized_gemm.cu", "h200", "--m=256 --n=256 --k=64"
    ),
    "55": Example(_MIXED, "h200", "--m=256 --n=128 --k=128 --mode=1 --g=128"),
    "61": Example(
        "61_hopper_gemm_with_topk_and_softmax/61_hopper_gemm_with_topk_and_softmax.cu", "h200", ""
    ),
    "63": Example(
        "63_hopper_gemm_with_weight_prefetch/63_hopper_gemm_with_weight_prefetch.cu", "h200", "--m=256 --n=128 --k=256"
    ),
    # Its copy_if leaves scales beyond the matrix as they were.
    "67": Example(
        f"{_BLOCKWISE}/{_BLOCKWISE}.cu", "h200", "--m=256 --n=256 --k=256", options="--sms=8 --tolerate=uninitialised"
    ),
    "70": Example("70_blackwell_gemm/70_blackwell_fp16_gemm.cu", "b200", "--m=256 --n=256 --k=128"),
    "72c": Example(
        "72_blackwell_narrow_precision_gemm/72c_blackwell_mixed_mxfp8_bf16_gemm.cu", "b200", "--m=256 --n=256 --k=256"
    ),
    "74 stream-K": Example(_STREAM_K, "b200", "--m=256 --n=128 --k=512 --decomposition=StreamK"),
    "74 split-K": Example(_STREAM_K, "b200", "--m=256 --n=128 --k=512 --decomposition=SplitK --splits=2"),
    "75": Example(
        "75_blackwell_grouped_gemm/75_blackwell_grouped_gemm.cu", "b200", "--m=256 --n=128 --k=256 --groups=2", 2
    ),
    "79d": Example(
        "79_blackwell_geforce_gemm/79d_blackwell_geforce_nvfp4_grouped_gemm.cu", "rtx-blackwell",
        "--m=256 --n=256 --k=256 --groups=2", 2,
    ),
    "81": Example(
        "81_blackwell_gemm_blockwise/81_blackwell_gemm_blockwise.cu", "b200", "--m=256 --n=128 --k=256"
    ),
    "87a": Example(_GEFORCE, "rtx-blackwell", "--m=128 --n=128 --k=256"),
    # cp.async beside tcgen05, with no proxy fence.
    "92 regular": Example(
        "92_blackwell_moe_gemm/92_blackwell_moe_gemm_regular.cu", "b200", "--m=128 --n=32 --k=128 --l=1", 3,
        "--sms=8 --tolerate=unfenced-cp-async",
    ),
    "92 grouped": Example(
        "92_blackwell_moe_gemm/92_blackwell_moe_gemm_grouped.cu", "b200", "--m=128 --n=32 --k=128 --l=2", 1,
        "--sms=8 --tolerate=unfenced-cp-async", _GROUPS,
    ),
}  # fmt: skip


def check(example: Example, directory: Path) -> None:
    try:
        find_toolkit()
        source = cutlass_includes()[0].parent / "examples" / example.source
    except EmulatorError as error:
        pytest.skip(str(error))
    arguments = [*example.arguments.split(), "--iterations=0"]
    if example.groups is not None:
        (directory / "groups").write_text(example.groups)
        arguments.append(f"--benchmark={directory / 'groups'}")
    # A process of its own: the examples call exit where they fail.
    command = [sys.executable, "-m", "ptx_emulator.shim", example.target, str(source), "--cutlass"]
    command += [*example.options.split(), "--", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.count("Disposition: Passed") == example.results, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", [HOPPER_FP8, NVFP4_OUTPUT], ids=["54", "72b"])
def test_the_examples_own_check_passes(example: Example, tmp_path: Path) -> None:
    check(example, tmp_path)


@pytest.mark.skipif(ALL not in os.environ, reason=f"compiling them takes a quarter of an hour: set {ALL}")
@pytest.mark.parametrize("example", OTHERS.values(), ids=OTHERS)
def test_the_other_examples_own_checks_pass(example: Example, tmp_path: Path) -> None:
    check(example, tmp_path)
