"""What README and the page of the command line say of targets, options and exit codes is so."""

import re
from pathlib import Path

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, inspect_engine
from trt_nvfp4.builder.cli.reference import written
from trt_nvfp4.builder.targets import TARGETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMAND_LINE = (ROOT / "docs" / "reference" / "command_line.md").read_text()


def _section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_targets_and_their_architectures() -> None:
    rows = {}
    for line in _section("Targets").split("### ")[0].splitlines():
        if line.startswith("| `") and "`--target`" not in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for name, arch in zip(re.findall(r"`([^`]+)`", cells[0]), (cells[2].split(", ") * 2), strict=False):
                rows[name] = (arch, "W4A4" in cells[4])
    assert rows == {name: (target.arch, target.fp4_instructions) for name, target in TARGETS.items()}


def test_options_of_the_commands() -> None:
    commands = {"build": build_engine, "compare": compare_engine, "bench": bench_engine, "inspect": inspect_engine}
    rows = re.findall(r"^\| `(\w+)-engine[^`]*` \|(.*)\|$", COMMAND_LINE, re.MULTILINE)
    assert {name for name, _ in rows} == commands.keys()
    for name, row in rows:
        known = {option for parameter in commands[name].app.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z0-9-]+", row)) <= known


def test_the_tables_of_options_are_the_commands() -> None:
    assert written(COMMAND_LINE) == COMMAND_LINE, "run make reference"


def test_exit_codes() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", COMMAND_LINE, re.MULTILINE)}
    named = {
        value for name, value in vars(errors).items() if name.isupper() and name[0] != "_" and isinstance(value, int)
    }
    assert listed == named | {0}


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200
