"""How a command ends when what it prints cannot be written."""

import errno
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs
import click
import onnx
import pytest
from click.testing import CliRunner
from command_lines import invoked
from rich.table import Table
from rich.text import Text

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, generate, inspect_engine
from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import failures, print_json
from trt_nvfp4.builder.options import Options, described
from trt_nvfp4.builder.report.command_line import command_line
from trt_nvfp4.builder.terminal import progress_lines
from trt_nvfp4.builder.terminal.output import output, status
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar
from trt_nvfp4.builder.terminal.progress_lines import ProgressLines


def print_to_who_has_gone() -> None:
    """As rich does."""
    try:
        raise BrokenPipeError
    except BrokenPipeError:
        sys.exit(1)


def test_a_reader_that_has_seen_enough_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False):
        print_to_who_has_gone()
    assert ended.value.exit_code == errors.READER_GONE
    assert "defect" not in capsys.readouterr().err


def test_a_commands_line_is_gone_when_it_ends() -> None:
    """What the API does after it in the same process was not asked for on a command line."""
    seen: list[str] = []

    @attrs.frozen
    class Named(Options):
        name: str = attrs.field(metadata=described("Any name."))

    app = Command("noted", Named, lambda given, as_json: seen.append(command_line.get()))
    assert CliRunner().invoke(app, ["a b"], prog_name="noted").exit_code == 0
    assert seen == ["noted 'a b'"]
    assert command_line.get() == ""


def test_sigterm_ends_a_command_and_nothing_after_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.exit_code == errors.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some cannot be imported again then, such as Torch."""
    monkeypatch.setitem(sys.modules, "trt_nvfp4.graph_passes.planning.plan", None)  # an ImportError
    with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False):
        raise KeyboardInterrupt
    assert ended.value.exit_code == errors.INTERRUPTED


def signal_in_an_import(number: signal.Signals) -> None:
    """As ml_dtypes and NumPy."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        raise RecursionError from None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_that_a_module_makes_another_error_of(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)  # the tests may run in the background
    try:
        with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False):
            signal_in_an_import(number)
        assert ended.value.exit_code == errors.INTERRUPTED
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_ctrl_c_stays_ignored_in_the_background() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with failures(debug=False):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_for_another_reason_is_one() -> None:
    with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False):
        sys.exit(0)
    assert ended.value.exit_code == errors.DEFECT


def run_command(name: str, *arguments: str | Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"trt_nvfp4.builder.cli.{name}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, text=True, **{**pipes, **streams})


@pytest.fixture
def full() -> Iterator[IO[str]]:
    with open("/dev/full", "w") as device:
        yield device


@pytest.fixture
def read_by_none() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "m.engine").write_bytes(b"engine")
    return tmp_path / "m.engine"


PRINTING = [["--help"], ["m.engine"], ["m.engine", "--json"]]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_what_cannot_be_printed(arguments: list[str], engine: Path, full: IO[str]) -> None:
    done = run_command("inspect_engine", *arguments, stdout=full, cwd=engine.parent)
    assert done.returncode == errors.BUILD_FAILED
    assert done.stderr == "error: stdout: No space left on device; free some space\n"


@pytest.mark.parametrize("arguments", [*PRINTING[:2], ["m.engine", "--json", "--debug"]], ids=" ".join)
def test_output_that_nobody_reads_any_more(arguments: list[str], engine: Path, read_by_none: int) -> None:
    done = run_command("inspect_engine", *arguments, stdout=read_by_none, cwd=engine.parent)
    assert done.returncode == errors.READER_GONE
    assert not done.stderr


def test_wrong_options_that_cannot_be_said(full: IO[str], read_by_none: int) -> None:
    assert run_command("inspect_engine", "--no-such-option", stderr=full).returncode == errors.USAGE
    assert run_command("inspect_engine", "--no-such-option", stderr=read_by_none).returncode == errors.READER_GONE


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("model.onnx", errors.BUILD_FAILED, "stderr: No space left on device; free some space"),
        ("lost.onnx", errors.MODEL_AT_FAULT, "lost.onnx: no such file or folder"),
    ],
)
def test_progress_that_cannot_be_printed(gated_mlps: Path, full: IO[str], model: str, code: int, message: str) -> None:
    """Where the command fails before that, this counts."""
    options = ["-o", "o.engine", "--target", "rtx-blackwell", "--stop-after", "plan", "--json"]
    done = run_command("build_engine", model, *options, stderr=full, cwd=gated_mlps.parent)
    assert done.returncode == code
    assert json.loads(done.stdout) == {"error": message, "exit_code": code}


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_stdout_that_is_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(click.exceptions.Exit) as ended, failures(debug=False, as_json=True):
        print_json("{}")
    assert ended.value.exit_code == errors.BUILD_FAILED
    assert "No space left on device" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the work they are no reason to fail."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    with failures(debug=False):
        output.print("модель é")
        sys.stdout.flush()
    expected = "модель é\n".encode("latin-1", errors="backslashreplace")
    assert shown.getvalue() == expected


@pytest.mark.parametrize(
    "command", [bench_engine, build_engine, compare_engine, inspect_engine], ids=lambda module: module.__name__
)
@pytest.mark.parametrize("arguments", [["--no-such-option"], []], ids=["an option that is none", "an argument missing"])
def test_wrong_options_are_json_too(command: types.ModuleType, arguments: list[str]) -> None:
    result = invoked(command.app, ["--json", *arguments], errors.USAGE)
    failure = json.loads(result.stdout)
    assert failure["exit_code"] == errors.USAGE
    assert failure["error"] in result.stderr
    assert CliRunner().invoke(command.app, arguments).stdout == ""


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (generate, ["Once upon a time"], "(Once upon a time); give a prompt with --prompt TEXT"),
        (
            build_engine,
            ["m.engine", "--target", "ada"],
            "(m.engine); name the engine to write with -o OUT.engine, or a bundle with --bundle DIR",
        ),
    ],
    ids=["generate", "build-engine"],
)
def test_an_argument_without_its_option(command: types.ModuleType, arguments: list[str], words: str) -> None:
    result = invoked(command.app, ["m.onnx", *arguments, "--json"], errors.USAGE)
    assert words in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    "command", [bench_engine, build_engine, compare_engine, inspect_engine], ids=lambda module: module.__name__
)
def test_version(command: types.ModuleType) -> None:
    result = invoked(command.app, ["--version"])
    assert result.stdout == f"trt-nvfp4 {importlib.metadata.version('trt-nvfp4')}\n"


@pytest.mark.parametrize(
    "command", [bench_engine, build_engine, compare_engine, inspect_engine], ids=lambda module: module.__name__
)
def test_commands_run_as_modules(command: types.ModuleType) -> None:
    """As where the folder of scripts is not on PATH, or Python runs under a debugger."""
    done = subprocess.run([sys.executable, "-m", command.__name__], capture_output=True, text=True)
    assert done.returncode == errors.USAGE
    assert "Missing argument" in done.stderr


HOSTILE = "a\x1b]0;title\x07\x9b2J\r\x08b :key: [red]\u202ec"
HARMLESS = "a\\x1b]0;title\\x07\\x9b2J\\r\\x08b :key: [red]\\u202ec"


def test_names_reach_the_terminal_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """In texts, in tables, where columns are as wide as what is shown, in progress and in failures."""
    table = Table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    for console in (output, status):
        console.print(HOSTILE, soft_wrap=True)
        console.print(Text(HOSTILE), soft_wrap=True)
        console.print(table, width=100)
    with ProgressBar() as progress:
        progress.stage(HOSTILE)
        progress.step(1, 1, HOSTILE)
    with pytest.raises(click.exceptions.Exit), failures(debug=False):
        raise errors.UsageError(HOSTILE)
    for shown in capsys.readouterr():
        assert set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e"} == set()
        assert shown.count(HARMLESS) >= 3  # Text drops some of them by itself
        # Tables are plain where no terminal shows them: the title, and the cell.
        assert [line.strip() for line in shown.splitlines()].count(HARMLESS) >= 3


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when a stage begins, at once where much is left, when asked, and when it ends."""
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr(progress_lines.time, "monotonic", lambda: float(next(now)))
    lines = ProgressLines()
    lines.stage("calibrating")
    lines.step(1, 4, "")
    lines.step(2, 4, "sample 2")
    lines.report()
    lines.stage("writing")
    lines.report()
    lines.finish()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "calibrating ..."
    assert re.fullmatch(r"calibrating: 1 of 4 \(25%\), \d+ min \d+ s so far, about \d+ min \d+ s left", shown[1])
    assert re.fullmatch(r"calibrating: 2 of 4 \(50%\), .* so far, about .* left, sample 2", shown[2])
    assert re.fullmatch(r"calibrating: done in \d+ min \d+ s", shown[3])
    assert [line.split(":")[0] for line in shown[4:]] == ["writing ...", "writing", "writing"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (250, "4 min 10 s"), (4800, "1 h 20 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert progress_lines.duration(seconds) == words


def test_wrong_options_are_shown_escaped() -> None:
    shown = invoked(inspect_engine.app, ["x", "--no\x1b]0;t\x07"], errors.USAGE)
    assert "\x1b]0" not in shown.output
    assert "\\x1b]0;t" in shown.output


def test_a_hostile_model_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name=HOSTILE)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [HOSTILE]) for name in ("x", "y"))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], HOSTILE, [x], [y])), "a:key:\x1b.onnx")
    shown = invoked(inspect_engine.app, ["a:key:\x1b.onnx"], env={"COLUMNS": "200"})
    assert "\x1b" not in shown.output
    assert HARMLESS in shown.output
    missing = CliRunner().invoke(inspect_engine.app, ["b:key:\x1b.onnx"])
    assert "b:key:\\x1b.onnx: no such file" in missing.stderr


def test_a_missing_option_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    invoked(
        build_engine.app, [tmp_path / "m.onnx", "-o", tmp_path / "m.engine"], errors.USAGE, "Missing option '--target'"
    )
