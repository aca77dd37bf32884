"""The benchmarks, most of which need a GPU, at least start: what they import of the project is there."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name",
    [
        "kernels/attention",
        "kernels/decode",
        "kernels/decoder",
        "kernels/diffusion_linears",
        "kernels/fp8_mlp",
        "kernels/fp8_moe",
        "kernels/hybrid_steps",
        "kernels/moe",
        "kernels/quantize",
        "models/drafts",
        "models/serving",
        "models/serving_load",
        "models/vla",
    ],
)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out" in _help(name, monkeypatch, capsys)


def test_help_of_the_plot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "[source] [out]" in _help("pages/plot", monkeypatch, capsys)


def _help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """In this process, which has imported torch already: that takes a new one seconds."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert not end.value.code
    return capsys.readouterr().out
