"""CUTLASS's examples, whole and unmodified: each checks its own result against its own reference, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim.toolkit import cutlass_includes, find_toolkit

pytestmark = pytest.mark.slow

# Example -> the GPU it is for, arguments for a problem of few tiles. Each compiles for a minute, so only what this
# project's kernels are made of and test_cutlass.py does not run: wgmma in FP8, NVFP4 outputs.
EXAMPLES = {
    "54_hopper_fp8_warp_specialized_gemm/54_hopper_fp8_warp_specialized_gemm.cu": ("h200", "--m=256 --n=256 --k=128"),
    "72_blackwell_narrow_precision_gemm/72b_blackwell_nvfp4_nvfp4_gemm.cu": ("b200", "--m=256 --n=256 --k=256"),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_own_check_passes(example: str) -> None:
    try:
        find_toolkit()
        source = cutlass_includes()[0].parent / "examples" / example
    except EmulatorError as error:
        pytest.skip(str(error))
    target, arguments = EXAMPLES[example]
    # A process of its own: the examples call exit where they fail.
    command = [sys.executable, "-m", "ptx_emulator.shim", target, str(source), "--cutlass", "--"]
    command += [*arguments.split(), "--iterations=0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "Disposition: Passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
