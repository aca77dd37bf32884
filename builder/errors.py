"""Failures and the exit codes that say whose they are."""

from __future__ import annotations

import errno
import re

from trt_nvfp4.errors import TrtNvfp4Error

DEFECT, USAGE, MODEL_AT_FAULT, UNAVAILABLE, VERIFICATION_FAILED, BUILD_FAILED, INTERRUPTED = 1, 2, 3, 4, 5, 6, 130
# For a closed pipe of the output: 128 and SIGPIPE, as in other programs.
READER_GONE = 141

# Names of the streams in messages, where files have their paths.
STDOUT, STDERR = "stdout", "stderr"

# Characters of a message.
_LONGEST = 3000
_MORE_MEMORY = "end other programs that use it, or run this on a machine with more"


# C0, DEL and C1; separators of lines; bidirectional marks.
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]")


class BuilderError(TrtNvfp4Error):
    """One message for the user; each kind has its exit code.

    `exit_code`: of an error that is raised again with more in its message.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = self.exit_code if exit_code is None else exit_code


class UsageError(BuilderError):
    """Options, shapes, a plan or data do not fit."""

    exit_code = USAGE


class ModelFaultError(BuilderError):
    """A model, engine or bundle is missing or broken, or cannot be served."""

    exit_code = MODEL_AT_FAULT


class UnavailableError(BuilderError):
    """A target, a package or a compiler is not there."""

    exit_code = UNAVAILABLE


class VerificationError(BuilderError):
    """The result is not what was planned or required."""

    exit_code = VERIFICATION_FAILED


class BuildFailedError(BuilderError):
    """TensorRT, CUDA or the system failed."""

    exit_code = BUILD_FAILED


def reported(message: str, exit_code: int) -> BuilderError:
    """The failure that another process ended with, by its exit code."""
    kinds = {kind.exit_code: kind for kind in BuilderError.__subclasses__()}
    return kinds[exit_code](message) if exit_code in kinds else BuilderError(message, exit_code)


def printable(text: str) -> str:
    """`text` for a terminal: control characters (but line feed and tab), which could move the cursor, set the window's
    title or the clipboard, and marks that reverse the direction of writing are escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def exit_code(error: BaseException) -> int | None:
    """The exit code of a failure that the user can act on; None for a defect of this program."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, TrtNvfp4Error):
        return error.exit_code
    if _is_taken(error):
        return USAGE
    if isinstance(error, OSError) or _out_of_memory(error):
        return BUILD_FAILED
    return None


def first_line(error: BaseException) -> str:
    """Type and first line of an exception of other code."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _out_of_memory(error: BaseException) -> bool:
    """True where the machine or its GPU lacks memory. Torch's allocator on the CPU has no exception type for it."""
    in_words = "out of memory" in str(error) or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and in_words)


def _is_taken(error: BaseException) -> bool:
    """Whether another run has made, since the check, the folder that this run's was to be renamed to."""
    return isinstance(error, OSError) and error.errno == errno.ENOTEMPTY and error.filename2 is not None


def message(error: BaseException) -> str:
    """The text to print: the error's own, shortened where names in it would fill the terminal, with advice where
    nothing can be written or memory is short."""
    text = _message(error)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} [... {len(text) - _LONGEST} characters ...] {text[-_LONGEST // 2 :]}"


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {str(error) or 'nothing half-written was left'}"
    if _out_of_memory(error):
        what = f" ({error})" if str(error) else ""
        return f"out of memory{what}; {_MORE_MEMORY}"
    if not isinstance(error, OSError):
        return str(error)
    # Two files are a copy's, and the disk that is full is the second's.
    file = error.filename2 or error.filename or ""
    if _is_taken(error):
        return f"{file}: exists already; choose a new folder or remove this one"
    elsewhere = "" if file in ("", STDOUT, STDERR) else ", or write elsewhere with -o"
    advice = {
        errno.ENOMEM: f"; {_MORE_MEMORY}",
        errno.ENOSPC: f"; free some space{elsewhere}",
        errno.EDQUOT: f"; free some space{elsewhere}",
        errno.EFBIG: f"; raise the limit of a file's size (ulimit -f){elsewhere}",
        errno.EACCES: "; choose a folder you can write to with -o",
        errno.EROFS: "; choose a folder you can write to with -o",
        errno.EEXIST: ", and is not a folder, as it must be; choose another place",
        errno.ENOTDIR: "; what is above it is a file; choose another place",
    }.get(error.errno or 0, "")
    return f"{file}: {error.strerror or error}{advice}".lstrip(": ")
