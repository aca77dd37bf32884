"""What README says of targets, options, exit codes and files is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, inspect_engine
from trt_nvfp4.builder.targets import TARGETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_targets_and_their_architectures() -> None:
    rows = {}
    for line in _section("Targets").splitlines():
        if line.startswith("| `") and "`--target`" not in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for name, arch in zip(re.findall(r"`([^`]+)`", cells[0]), (cells[2].split(", ") * 2), strict=False):
                rows[name] = (arch, "W4A4" in cells[4])
    assert rows == {name: (target.arch, target.fp4_instructions) for name, target in TARGETS.items()}


def test_options_of_the_commands() -> None:
    commands = {"build": build_engine, "compare": compare_engine, "bench": bench_engine, "inspect": inspect_engine}
    rows = re.findall(r"^\| `(\w+)-engine[^`]*` \|(.*)\|$", _section("The command line"), re.MULTILINE)
    assert {name for name, _ in rows} == commands.keys()
    for name, row in rows:
        command = typer.main.get_command(commands[name].app)
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z0-9-]+", row)) <= known


def test_exit_codes() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", _section("The command line"), re.MULTILINE)}
    named = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert listed == named | {0}


def _fastest(run: dict[str, Any], contestant: str) -> float:
    """Median microseconds of the fastest of its ways."""
    return min(timing["median_us"] for name, timing in run["timings"].items() if name.startswith(contestant))


def test_speed_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())
    for run in recorded["stack"]:
        ours = run["timings"]["nvfp4 persistent bf16"]["median_us"]
        ratios = [_fastest(run, name) / ours for name in ("bf16", "fp8", "humming", "nvfp4 layer by layer bf16")]
        fraction = run["bandwidth_fractions"]["nvfp4 persistent bf16"]
        row = [str(run["m"]), f"{fraction:.0%}", *(f"{ratio:.2f}x" for ratio in ratios)]
        assert f"| {' | '.join(row)} |" in _section("Speed")
    slower = {
        run["m"]: run["timings"]["bf16 autotuned"]["median_us"] / run["timings"]["bf16"]["median_us"] - 1
        for run in recorded["stack"]
    }
    most = max(slower, key=lambda tokens: slower[tokens])
    assert f"took up to {slower[most]:.0%} longer ({most} tokens)" in " ".join(_section("Speed").split())


def test_speed_on_an_h100_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "decode_h100.json").read_text())
    fractions = [run["bandwidth_fractions"]["nvfp4 persistent bf16"] for run in recorded["stack"]]
    text = " ".join(_section("Speed").split())
    assert f"({recorded['read_bandwidth'] / 1e12:.2f} TB/s)" in text
    assert f"at {', '.join(f'{fraction:.0%}' for fraction in fractions)} of bandwidth" in text
    for other in ("BF16", "FP8"):
        ratios = [
            _fastest(run, other.lower()) / run["timings"]["nvfp4 persistent bf16"]["median_us"]
            for run in recorded["stack"]
        ]
        assert re.search(f"{', '.join(f'{ratio:.2f}x' for ratio in ratios)} as (fast as )?{other}", text)


def test_speed_of_mixtures_on_an_h100_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "moe_h100.json").read_text())
    text = " ".join(_section("Speed").split())
    fractions = [f"{run['bandwidth_fractions']['nvfp4']:.0%}" for run in recorded["moe"]]
    assert f"read at {', '.join(fractions)} of bandwidth ({recorded['read_bandwidth'] / 1e12:.2f} TB/s)" in text
    for other, name in (("bf16", "BF16"), ("humming", "humming's GEMMs")):
        ratios = [_fastest(run, other) / run["timings"]["nvfp4"]["median_us"] for run in recorded["moe"]]
        assert re.search(rf"{min(ratios):.2f}x to {max(ratios):.2f}x as (fast as )?{name}", text)


def test_speed_of_linears_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())
    for run in recorded["linear"]:
        times = {name: timing["median_us"] for name, timing in run["timings"].items()}
        ratios = [times[name] / times["nvfp4 fp16"] for name in ("bf16", "int4", "humming")]
        fraction = run["bandwidth_fractions"]["nvfp4 fp16"]
        row = [f"{run['n']}x{run['k']}", str(run["m"]), f"{fraction:.0%}", *(f"{ratio:.2f}x" for ratio in ratios)]
        assert f"| {' | '.join(row)} |" in _section("Speed")


def test_speed_of_linears_on_an_h100_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "decode_h100.json").read_text())
    runs = sorted(recorded["linear"], key=lambda run: (run["n"], run["k"], run["m"]))
    rows = re.findall(r"^\| (\d+)x(\d+) \| (\d+) \|", _section("Speed"), re.MULTILINE)
    assert [(run["n"], run["k"], run["m"]) for run in runs] == [tuple(map(int, row)) for row in rows]
    text = " ".join(_section("Speed").split())
    fractions = [f"{run['bandwidth_fractions']['nvfp4 fp16']:.0%}" for run in runs]
    assert f"read at {', '.join(fractions)} of bandwidth ({recorded['read_bandwidth'] / 1e12:.2f} TB/s)" in text
    for other, name in (("bf16", "BF16"), ("humming", "humming")):
        ratios = [run["timings"][other]["median_us"] / run["timings"]["nvfp4 fp16"]["median_us"] for run in runs]
        assert re.search(rf"{min(ratios):.2f}x to {max(ratios):.2f}x as (fast as )?{name} ", text)


def test_fp8_speed_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "fp8_mlp.json").read_text())
    for run in recorded["stack"]:
        times = {name: timing["median_us"] for name, timing in run["timings"].items()}
        ours = times["fp8 plugin"]
        ratios = [times[name] / ours for name in ("torch", "torch, fast accumulation")]
        fractions = [run["floor_us"] / ours, run["fraction_of_peak"]]
        row = [str(run["m"]), f"{ours:.0f} us", *(f"{f:.0%}" for f in fractions), *(f"{r:.2f}x" for r in ratios)]
        assert f"| {' | '.join(row)} |" in _section("Speed")


@pytest.mark.parametrize(
    ("file", "plugin", "others"),
    [
        ("moe", "nvfp4", ("bf16", "humming")),
        ("fp8_moe", "fp8 plugin", ("bf16", "fp8 GEMMs, expert by expert", "fp8 GEMMs, grouped")),
    ],
)
def test_moe_speed_is_what_was_recorded(file: str, plugin: str, others: tuple[str, ...]) -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    for run in recorded["moe"]:
        times = {name: timing["median_us"] for name, timing in run["timings"].items()}
        ours = times[plugin]
        fastest = [min(time for name, time in times.items() if name.startswith(other)) for other in others]
        ratios = [f"{time / ours:.2f}x" for time in fastest]
        least = run["megabytes"] / recorded["read_bandwidth"] * 1e12  # us
        fractions = [f"{least / time:.0%}" for name, time in times.items() if name.startswith(plugin)]
        row = [run["model"], str(run["tokens"]), f"{ours:.0f} us", *fractions, *ratios]
        assert f"| {' | '.join(row)} |" in _section("Speed")
