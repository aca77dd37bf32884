"""What the commands share: progress on stderr, one message per failure, exit codes."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer.core import TyperCommand

EXIT_CODES = (
    "Exit codes: 0 done; 2 usage (options, shapes, a plan or calibration data that do not fit); "
    "3 the model, engine or bundle is at fault or missing; 4 target, back end or compiler unavailable; "
    "5 verification failed; 6 build failed (full disks included); 130 interrupted; 1 a defect of this program."
)
DEBUG = typer.Option("--debug", help="Show the traceback of a failure.")
JSON = typer.Option("--json", help="Print the result as JSON on stdout (progress stays on stderr).")

# UsageError, which Typer takes from Click or, in newer versions, from a copy of its own.
USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__bases__[0]

# No markup: names of nodes and files may hold brackets.
output = Console(markup=False)
status = Console(stderr=True, markup=False)


class ProgressBar:
    """The pipeline's Progress as a bar: one line per stage, the running one moving. A context manager."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=status,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._finish()
        self._task = self._bar.add_task(text, total=None, detail="")

    def step(self, done: int, total: int, text: str = "") -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, detail=text)

    def _finish(self) -> None:
        if self._task is not None:
            total = self._bar.tasks[-1].total or 1
            self._bar.update(self._task, completed=total, total=total, detail="")


@contextmanager
def failures(debug: bool, as_json: bool = False) -> Iterator[None]:
    """Turn an exception into one message and an exit code; with `debug` let it through.

    What ends a process on a server, SIGTERM, cleans up as Ctrl-C does.
    """
    # Names of files and tensors may hold what the terminal's encoding has not; stderr escapes it anyway.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    # A job in the background of a script ignores Ctrl-C.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    numbers = (signal.SIGTERM,) if ignored else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except BaseException as error:
        from trt_nvfp4.builder import errors

        # rich ends a command whose reader, such as head, has seen enough.
        if debug or (isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)):
            raise
        if interrupted:  # extension modules that are being imported make other errors of it
            error = KeyboardInterrupt()
        code = errors.exit_code(error)
        text = errors.message(error)
        if code is None:
            code = errors.DEFECT
            text = (
                f"{type(error).__name__}: {text} (a defect of trt-nvfp4: please report it with the output of --debug)"
            )
        if as_json:
            _print_failure(text, code)
        status.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)
        raise typer.Exit(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Command(TyperCommand):
    """A command whose wrong options, too, are JSON on stdout where ``--json`` asks for it."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        as_json = "--json" in args
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except USAGE_ERROR as error:
            if as_json:
                _print_failure(error.format_message(), error.exit_code)
            raise


def _print_failure(text: str, code: int) -> None:
    with suppress(OSError):  # stdout itself may be what failed
        print(json.dumps({"error": text, "exit_code": code}), flush=True)


def print_json(text: str) -> None:
    """JSON as it is: no colours, no wrapping."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # here, where a failure has its message
