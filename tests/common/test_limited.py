"""Code runs in a process of its own, which ends at limits of time and memory; nothing of it stays."""

import errno
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trt_nvfp4.common import limited as module
from trt_nvfp4.common.limited import LimitError, UnfinishedError, limited


def test_results_and_their_process() -> None:
    seen: list[int] = []

    def large() -> dict[str, Any]:
        seen.append(1)
        return {"pid": os.getpid(), "text": "é" * 3_000_000}

    found = limited(large, 20)
    assert found["text"] == "é" * 3_000_000
    assert found["pid"] != os.getpid()
    assert seen == []
    with pytest.raises(ChildProcessError):  # it was waited for
        os.waitpid(found["pid"], os.WNOHANG)


def endless() -> None:
    while True:
        pass


def raising() -> None:
    raise KeyError("what is missing")


def nameless() -> None:
    raise RuntimeError


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def silent() -> None:
    raise SilentError


def hoard() -> int:
    """Leaves no memory for even a small object: the lists are kept by the frame that its exception holds."""
    kept: list[Any] = []
    while True:
        kept.append([kept])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (endless, "does not end within 1 s"),
        (lambda: time.sleep(100), "does not end within 1 s"),
        (lambda: bytearray(1 << 42), "takes more than 2 GB of memory"),
        (lambda: len(bytes(2 * module.MEMORY)), "takes more than 2 GB of memory"),
        (os.abort, "ended early .SIGABRT"),
        (lambda: os._exit(3), "ended early .status 3"),
        (raising, "^KeyError: 'what is missing'$"),
        (nameless, "RuntimeError"),
        (silent, "SilentError"),
        (lambda: object(), "not JSON serializable"),
    ],
)
def test_what_does_not_end_well(function: Callable[[], Any], words: str) -> None:
    started = time.monotonic()
    with pytest.raises(LimitError, match=words) as failure:
        limited(function, 1 if "does not end" in words else 20)
    assert time.monotonic() - started < 30
    is_limit = any(part in words for part in ("does not end", "memory"))
    assert isinstance(failure.value, UnfinishedError) == is_limit


def test_half_the_memory_suffices() -> None:
    assert limited(lambda: len(bytearray(module.MEMORY // 2)), 20) == module.MEMORY // 2


def test_many_small_objects_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the answer finds memory, the process is said to have died: this one goes on in any case."""
    monkeypatch.setattr(module, "MEMORY", 1 << 27)
    with pytest.raises(LimitError, match=r"takes more than 0.125 GB of memory|its process ended early"):
        limited(hoard, 60)


def test_too_large_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1 << 20)
    assert len(limited(lambda: "x" * (1 << 19), 20)) == 1 << 19
    with pytest.raises(LimitError, match="its result is larger than 1048576 bytes"):
        limited(lambda: "x" * (1 << 22), 20)


def test_descriptors_beyond_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1200, hard), hard))
    try:
        while not held or held[-1] < 1024:
            held.append(os.dup(1))
        assert limited(lambda: 7, 20) == 7
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_within_another() -> None:
    assert limited(lambda: limited(lambda: [7], 20), 20) == [7]


def test_processes_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is forked while this thread has a pipe open, and goes on, does not keep this thread from its answer."""
    gate, opener = os.pipe()
    piped = threading.Event()
    others = [
        threading.Thread(target=lambda: piped.wait() and limited(lambda: os.read(gate, 1).decode(), 60)),
        threading.Thread(target=lambda: piped.wait() and read_in_a_fork(gate)),
    ]
    pipe, here = os.pipe, threading.get_ident()

    def slow_pipe() -> tuple[int, int]:
        ends = pipe()
        if threading.get_ident() == here:
            piped.set()
            time.sleep(0.3)
        return ends

    monkeypatch.setattr(os, "pipe", slow_pipe)
    for other in others:
        other.start()
    try:
        assert limited(lambda: 7, 10) == 7
    finally:
        os.write(opener, b"ab")
        for other in others:
            other.join()
        for end in (gate, opener):
            os.close(end)


def read_in_a_fork(gate: int) -> None:
    """As other code forks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.read(gate, 1)
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["fork", "pipe"])
def test_no_process(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails() -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, name, fails)
    with pytest.raises(UnfinishedError, match=r"no process could be started: .*temporarily unavailable"):
        limited(lambda: 7, 20)
    assert os.listdir("/proc/self/fd") == before


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even where that is killed, and can end nothing itself."""
    child = tmp_path / "child"
    program = f"""
import os, time
from pathlib import Path
from trt_nvfp4.common.limited import limited

def run():
    Path({str(child)!r}).write_text(str(os.getpid()))
    time.sleep(1000)

limited(run, 1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: child.is_file() and child.read_text() != "")
        running = psutil.Process(int(child.read_text()))
        assert running.ppid() == parent.pid
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: has_ended(running))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # where nobody waits for orphans
    except psutil.NoSuchProcess:
        return True


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("not within a minute")
