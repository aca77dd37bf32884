"""What the commands share: progress on stderr, one message per failure, exit codes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import typer
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.command_line import command_line
from trt_nvfp4.builder.parallel.launched import Launched, is_first

EXIT_CODES = (
    "Exit codes: 0 done; 2 usage (options, shapes, a plan or calibration data that do not fit); "
    "3 the model, engine or bundle is at fault or missing; 4 target, back end or compiler unavailable; "
    "5 verification failed; 6 build failed (full disks included); 130 interrupted; "
    "141 the reader of the output, such as head, closed the pipe; 1 a defect of this program."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"trt-nvfp4 {importlib.metadata.version('trt-nvfp4')}", highlight=False)
        raise typer.Exit


DEBUG = typer.Option("--debug", help="Show the traceback of a failure.")
JSON = typer.Option("--json", help="Print the result as JSON on stdout (progress stays on stderr).")
TRUST = typer.Option(
    "--trust-remote-code",
    help="Run Python code that comes in the Hugging Face directory (model, tokenizer). Read it first.",
)
VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")

# UsageError, which Typer takes from Click or, in newer versions, from a copy of its own.
USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__bases__[0]


@contextmanager
def _naming(stream: str) -> Iterator[None]:
    """Let a failure of writing to a stream name it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or stream
        raise


class _Console(Console):
    """Names of nodes, tensors and files may be hostile: their control characters are escaped, brackets are no markup,
    and `:key:` is no emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before it is measured, for columns of tables.
        return super().render_str(errors.printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else errors.printable(text), style, control)


# Of a line where none is broken.
_UNBROKEN = 10_000


class _Output(_Console):
    """stdout, named where it cannot be written. In a pipe or a file, tables are plain: no lines around cells, and a row
    of each is one line, for `grep` and `cut`; COLUMNS sets another width."""

    @property
    def size(self) -> ConsoleDimensions:
        piped = not self.is_terminal and "COLUMNS" not in os.environ
        return ConsoleDimensions(_UNBROKEN, 25) if piped else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    @_naming(errors.STDOUT)
    def print(self, *objects: Any, **options: Any) -> None:
        for table in objects:
            if isinstance(table, Table) and not self.is_terminal:
                table.box, table.padding = None, (0, 2, 0, 0)
        super().print(*objects, **options)


output = _Output()
status = _Console(stderr=True)


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

    @_naming(errors.STDERR)
    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    @_naming(errors.STDERR)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        with suppress(OSError) if kind is not None else nullcontext():  # what failed before counts
            self._bar.stop()

    @_naming(errors.STDERR)
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
def failures(debug: bool, as_json: bool = False, *models: Path) -> Iterator[None]:
    """Turn an exception into one message and an exit code; with `debug` let it through.

    What ends a process on a server, SIGTERM, cleans up as Ctrl-C does. Of processes that torchrun or mpirun started
    for the ranks in one of the folders `models`, the first alone prints, but for errors.
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
        output.quiet = status.quiet = _is_later_rank(models)
        yield
    except (typer.Exit, USAGE_ERROR):
        raise
    except BaseException as error:
        if debug or _reader_has_gone(error):
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
        if as_json and not output.quiet:
            _print_failure(text, code)
        where = _rank() if status.quiet else ""
        status.quiet = False
        with suppress(OSError):
            status.print(Text.assemble(("error: ", "bold red"), where, text), soft_wrap=True)
        raise typer.Exit(code) from None
    finally:
        output.quiet = status.quiet = False
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_later_rank(models: Sequence[Path]) -> bool:
    folders = [model for model in models if model.is_dir()]
    if not folders:
        return False
    from trt_nvfp4.builder.parallel.manifest import FILE  # imports onnx

    return any((folder / FILE).is_file() for folder in folders) and not is_first()


def _rank() -> str:
    """In front of a message of a process that prints nothing else."""
    launched = Launched.found()
    return "" if launched is None else f"rank {launched.rank}: "


def _reader_has_gone(error: BaseException) -> bool:
    """rich and Click make a SystemExit of it."""
    return isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError)


class Command(TyperCommand):
    """A command that ends as `failures` says, too, where what Typer prints, help and wrong options, cannot be written.

    Wrong options, too, are JSON on stdout where ``--json`` asks for it. `extra`: what to say after
    "unexpected extra argument".
    """

    extra = ""

    def main(self, *rest: Any, **extra: Any) -> Any:
        before = command_line.set("")
        try:
            return super().main(*rest, **extra)
        except SystemExit as ended:
            if _reader_has_gone(ended):
                sys.exit(errors.READER_GONE)
            raise
        except OSError as error:
            if isinstance(error.__context__, USAGE_ERROR):  # which stderr did not take
                sys.exit(error.__context__.exit_code)
            raise
        finally:
            command_line.reset(before)
            _let_go_of_streams()

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # takes no value, and help shows none
        return params

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        as_json = "--json" in args
        command_line.set(shlex.join([info_name or "", *args]))
        try:
            with failures("--debug" in args, as_json), _naming(errors.STDOUT):  # of help
                return super().make_context(info_name, args, *rest, **extra)
        except USAGE_ERROR as error:
            if "unexpected extra argument" in error.message:
                error.message += self.extra
            if as_json:
                _print_failure(error.format_message(), error.exit_code)
            error.message = errors.printable(error.message)
            raise


def _print_failure(text: str, code: int) -> None:
    with suppress(OSError):  # stdout itself may be what failed
        print(json.dumps({"error": text, "exit_code": code}), flush=True)


def _let_go_of_streams() -> None:
    """Those that cannot be written: Python would try again as it ends, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@_naming(errors.STDOUT)
def print_json(text: str) -> None:
    """JSON as it is: no colours, no wrapping."""
    if output.quiet:
        return
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # here, where a failure has its message
