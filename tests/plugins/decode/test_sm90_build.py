"""What the compiler makes of the SM90 kernels: no spills, no multiplication that waits for the one before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import trt_nvfp4.plugins
from trt_nvfp4.plugins.toolchain import ToolchainError, find_nvcc

SOURCE = Path(trt_nvfp4.plugins.__file__).parent / "kernels" / "hopper" / "sm90_w4a16.cu"


@pytest.mark.slow
def test_no_spills_and_no_serialized_wgmma(tmp_path: Path) -> None:
    try:
        toolchain = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    flags = [*toolchain.compile_flags(), "-std=c++17", "-O3", "-Xptxas=-v", "-cubin", "-arch=sm_90a"]
    command = [toolchain.nvcc, *flags, "-o", tmp_path / "cubin", SOURCE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == 6, "two dtypes; two numbers of tokens, and the rows between"
    assert set(spills) == {("0", "0")}
    assert "serialized" not in report
