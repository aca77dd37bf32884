"""Runs what a stranger's file makes arbitrarily long or large in a process of its own, which is ended beyond limits."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Bytes that the process may take beside what this one has.
MEMORY = 2 << 30
# The C library of this process. Loaded before any fork.
_LIBC = ctypes.CDLL(None)
# PR_SET_PDEATHSIG of linux/prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
# Bytes of a result.
_LARGEST = 1 << 30
# Held wherever this process forks, by whatever code, and while the writing end of a pipe is open here: a process that
# another thread forks would keep that end, and its reader would see no end before that process does.
_FORKING = threading.RLock()
# Taken before the hooks of filelock run, which from Python 3.12 on forbid a fork while another thread is in one: those
# that are registered first run last. The device that runs a bundle has none.
with suppress(ImportError):
    import filelock  # noqa: F401
os.register_at_fork(before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_FORKING.release)
# Errors whose text says little by itself: a key, or nothing.
_TERSE = (AssertionError, LookupError)


class LimitError(Exception):
    """The time or the memory did not suffice, the process died, or what ran there raised an error; says which."""


class UnfinishedError(LimitError):
    """The time or the memory did not suffice, or no process could be started: nothing is known of what should run."""


def limited(function: Callable[[], Any], seconds: float, memory: int | None = None) -> Any:
    """The result of `function`, converted to JSON and back. It runs in a fork of this process, so that nothing that it
    changes lasts, and should compute only in Python, or on one thread: no other thread goes on there.

    `memory`: bytes that it may take beside what this process has; `MEMORY` unless given. Raises LimitError, as
    UnfinishedError where that says nothing of `function`.
    """
    memory = MEMORY if memory is None else memory
    parent = os.getpid()
    with _FORKING:
        reader, writer, child = _forked()
        if child:
            os.close(writer)
    if child == 0:
        try:
            _end_with(parent)
            _run(function, writer, memory)
        finally:  # whatever was raised: the fork must not go on as the program that it was made of
            os._exit(1)
    try:
        answer = _read(reader, seconds)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        raise UnfinishedError(f"it does not end within {seconds:.0f} s")
    try:
        found = json.loads(answer)
    except ValueError:
        raise LimitError(f"its process ended early ({_ending(status)})") from None
    if "limit" in found:
        raise UnfinishedError(found["limit"])
    if "failure" in found:
        raise LimitError(found["failure"])
    return found["result"]


def _forked() -> tuple[int, int, int]:
    """Both ends of a pipe and, in this process, the number of another, which is a fork of it; 0 there."""
    ends: tuple[int, ...] = ()
    try:
        ends = reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, beside other threads
            return reader, writer, os.fork()
    except OSError as error:
        for end in ends:
            os.close(end)
        raise UnfinishedError(f"no process could be started: {error}") from error


def _end_with(parent: int) -> None:
    """Let this process be ended when its parent is, however that ends. The signal comes when the thread that forked
    ends, which waits in `limited`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _run(function: Callable[[], Any], writer: int, memory: int) -> None:
    """In the fork, which ends here."""
    # Made now: where it is needed, no memory may be left to make it.
    no_memory = json.dumps({"limit": f"it takes more than {memory / (1 << 30):.3g} GB of memory"}).encode()
    # Its threads are not there; it would wait for them, or say so on stderr.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what panics in Rust prints
        faulthandler.disable()  # the caller says how it ended
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + memory
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer = json.dumps({"result": function()}).encode()
    except MemoryError:
        answer = no_memory
    except BaseException as error:  # it says all that it can, and ends
        answer = _failure(error, no_memory)
    left = memoryview(answer)
    while left:
        left = left[os.write(writer, left) :]
    os._exit(0)


def _failure(error: BaseException, no_memory: bytes) -> bytes:
    name = type(error).__name__
    try:
        text = str(error)
        if isinstance(error, _TERSE) and text:
            text = f"{name}: {text}"
        return json.dumps({"failure": text or name}).encode()
    except MemoryError:
        return no_memory
    except BaseException:  # its text cannot be had
        return json.dumps({"failure": name}).encode()


def _read(reader: int, seconds: float) -> bytes | None:
    """All that comes; None where it does not end in time. Raises LimitError where too much comes."""
    parts: list[bytes] = []
    deadline, size = time.monotonic() + seconds, 0
    ready = select.poll()  # takes any descriptor, where select takes only those below 1024
    ready.register(reader, select.POLLIN)
    while ready.poll(max(deadline - time.monotonic(), 0) * 1000):
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > _LARGEST:
            raise LimitError(f"its result is larger than {_LARGEST} bytes")
    return None


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"status {os.WEXITSTATUS(status)}"
