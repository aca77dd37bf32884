"""The benchmarks that need a GPU at least start: what they import of the project is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["crossovers", "decode", "fp8_mlp", "fp8_moe", "fp8_sweep", "moe", "quantize"])
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported torch already: that takes a new one seconds."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert not end.value.code
    assert "--out" in capsys.readouterr().out
