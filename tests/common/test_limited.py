"""Code runs in a process of its own, which ends at limits of time and memory; nothing of it stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from trt_nvfp4.common import limited as module
from trt_nvfp4.common.limited import LimitError, limited


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


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (endless, "does not end within 1 s"),
        (lambda: time.sleep(100), "does not end within 1 s"),
        (lambda: bytearray(1 << 42), "takes more than 2 GB of memory"),
        (lambda: len(bytes(2 * module.MEMORY)), "takes more than 2 GB of memory"),
        (os.abort, "ended early .SIGABRT"),
        (lambda: os._exit(3), "ended early .status 3"),
        (raising, "what is missing"),
        (nameless, "RuntimeError"),
        (lambda: object(), "not JSON serializable"),
    ],
)
def test_what_does_not_end_well(function: Callable[[], Any], words: str) -> None:
    started = time.monotonic()
    with pytest.raises(LimitError, match=words):
        limited(function, 1)
    assert time.monotonic() - started < 15


def test_half_the_memory_suffices() -> None:
    assert limited(lambda: len(bytearray(module.MEMORY // 2)), 20) == module.MEMORY // 2
