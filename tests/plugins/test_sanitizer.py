"""compute-sanitizer's four tools over every op, and over the W4A16 kernel, at small odd shapes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = [f"sanitize_ops.py {dtype}" for dtype in ("float16", "bfloat16", "float32")] + ["decode/sanitize_w4a16.py"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_clean(library: Path, tool: str, program: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    file, *arguments = program.split()
    path = os.pathsep.join([str(HERE), *sys.path])  # op_inputs, and the package as this process finds it
    result = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, HERE / file, library, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "RACECHECK SUMMARY: 0 hazards" in result.stdout
