"""The benchmarks that need a GPU at least start: what they import of the project is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["crossovers", "decode", "fp8_mlp", "fp8_moe", "fp8_sweep", "moe", "quantize"])
def test_help(name: str) -> None:
    result = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "--out" in result.stdout
