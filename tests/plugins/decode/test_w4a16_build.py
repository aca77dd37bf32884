"""What the compiler makes of the decode kernel on every architecture: no spills; native E2M1 on Blackwell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trt_nvfp4.plugins
from trt_nvfp4.plugins.toolchain import ToolchainError, find_nvcc

ARCHES = ["80", "89", "90a", "100a", "103a", "110a", "120a", "121a"]
SOURCE = Path(trt_nvfp4.plugins.__file__).parent / "kernels" / "api" / "w4a16.cu"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_no_spills_and_native_conversion(arch: str, tmp_path: Path) -> None:
    try:
        toolchain = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    cubin = tmp_path / "w4a16.cubin"
    command = [
        toolchain.nvcc,
        *toolchain.compile_flags(),
        "-std=c++17",
        "-O3",
        "-Xptxas=-v",
        "-cubin",
        f"-arch=sm_{arch}",
    ]
    done = subprocess.run([*command, "-o", cubin, SOURCE], check=True, capture_output=True, text=True)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout + done.stderr)
    assert len(spills) == 16, "two dtypes, four token counts, linear and MLP"
    assert set(spills) == {("0", "0")}
    cuobjdump = shutil.which("cuobjdump") or next(Path(toolchain.nvcc).parent.glob("cuobjdump"), None)
    if int(arch.rstrip("a")) < 100 or cuobjdump is None:
        return
    assembly = subprocess.run([cuobjdump, "-sass", cubin], check=True, capture_output=True, text=True).stdout
    fp16 = "\n".join(f for f in assembly.split("Function : ") if "6__half" in f.splitlines()[0])
    assert re.search(r"E2M1", fp16), "FP16 activations: the conversion instruction"
