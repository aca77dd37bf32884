"""One message per failure, and the exit code of a command."""

import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
from rich.text import Text

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.shadowed import shadowed
from trt_nvfp4.builder.parallel.launched import Launched, is_first
from trt_nvfp4.builder.terminal.output import naming, output, status


@contextmanager
def failures(debug: bool, as_json: bool = False, *models: Path) -> Iterator[None]:
    """Turn an exception into one message and an exit code; with `debug` let it through.

    SIGTERM, which ends processes on servers, cleans up as Ctrl-C does. If torchrun or mpirun started several processes
    for the ranks in one of the folders `models`, only the first prints anything but errors.
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
    except (click.exceptions.Exit, click.UsageError):
        raise
    except BaseException as error:
        if _reader_has_gone(error):
            raise click.exceptions.Exit(errors.READER_GONE) from None
        if debug:
            raise
        if interrupted and not isinstance(
            error, KeyboardInterrupt
        ):  # extension modules that are being imported make other errors of it
            error = KeyboardInterrupt()
        code = errors.exit_code(error)
        text = errors.message(error)
        if code is None and (found := shadowed(error)) is not None:
            code, text = errors.UNAVAILABLE, found
        if code is None:
            code = errors.DEFECT
            text = (
                f"{type(error).__name__}: {text} (a defect of trt-nvfp4: please report it with the output of --debug)"
            )
        if as_json and not output.quiet:
            print_failure(text, code)
        where = _rank() if status.quiet else ""
        status.quiet = False
        with suppress(OSError):
            status.print(Text.assemble(("error: ", "bold red"), where, text), soft_wrap=True)
        raise click.exceptions.Exit(code) from None
    finally:
        output.quiet = status.quiet = False
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_later_rank(models: Sequence[Path]) -> bool:
    if is_first():
        return False
    from trt_nvfp4.builder.parallel.manifest import FILE  # imports onnx

    return any((model / FILE).is_file() for model in models)


def _rank() -> str:
    """In front of a message of a process that prints nothing else."""
    launched = Launched.found()
    return "" if launched is None else f"rank {launched.rank}: "


def _reader_has_gone(error: BaseException) -> bool:
    """rich and Click make a SystemExit of it."""
    return isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError)


def print_failure(text: str, code: int) -> None:
    """A failure as JSON on stdout."""
    with suppress(OSError):  # stdout itself may be what failed
        print(json.dumps({"error": text, "exit_code": code}), flush=True)


def let_go_of_streams() -> None:
    """Those that cannot be written: Python would try again as it ends, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # has no descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@naming(errors.STDOUT)
def print_json(text: str) -> None:
    """JSON as it is: no colours, no wrapping."""
    if output.quiet:
        return
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # here, where a failure has its message
