"""Runs compilers, several at a time, and ends all of them when one fails or the user interrupts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TypeVar

from trt_nvfp4.plugins.compile.toolchain import ToolchainError, cache_dir

T = TypeVar("T")


class Compilers:
    """The compiler processes of one build."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: Sequence[str | Path], folder: Path | None = None) -> str:
        """Runs a compiler, in ``folder``, and returns its output. Raises ToolchainError where it fails."""
        # A group of its own: nvcc does not end the compilers that it starts.
        process = subprocess.Popen(
            command,
            cwd=folder,
            # nvcc fails where the caller's is closed.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running.add(process)
        try:
            printed, _ = process.communicate()
        except BaseException:
            _end([process])
            raise
        finally:
            self._running.discard(process)
        if process.returncode != 0:
            raise ToolchainError(_failure(command, process.returncode, printed))
        return printed

    def map(self, make: Callable[[T], object], items: Sequence[T], done: Callable[[int, T], object]) -> None:
        """Calls ``make`` of every item, one for each core at a time, and ``done`` with the number made and the item.

        The first exception ends what runs and is raised.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = {pool.submit(make, item): item for item in items}
            try:
                for number, job in enumerate(as_completed(jobs), 1):
                    job.result()
                    done(number, jobs[job])
            except BaseException:
                # Ctrl-C among others: the rest of a compilation may take minutes.
                pool.shutdown(wait=False, cancel_futures=True)
                while any(job.running() for job in jobs):
                    _end(tuple(self._running))
                raise


def _failure(command: Sequence[str | Path], status: int, printed: str) -> str:
    if os.strerror(errno.ENOSPC) in printed:
        return (
            f"compilation failed: no space left in {cache_dir()} or in {gettempdir()}; free some, or name folders "
            "with space by TRT_NVFP4_CACHE and TMPDIR"
        )
    return f"compilation failed (exit status {status}): {' '.join(map(str, command))}\n{printed[-4000:]}"


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends processes and those that they started."""
    # nvcc removes its temporary files on SIGINT, which is ignored where the command was started in the background.
    for ending in (signal.SIGINT, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.02)
