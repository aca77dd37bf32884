"""Keeps files of weights that are mapped into memory from filling it: what was read of them is given back."""

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: So much of mapped files may be resident beyond what was at the start.
RESIDENT_BYTES = 1 << 30
_WEIGHTS = (".safetensors", ".data", ".onnx", ".bin")
_MAPS, _RESIDENT = Path("/proc/self/maps"), Path("/proc/self/status")
_SECONDS = 0.02
# Drops pages of a mapping, and what was written to private ones; and drops them but for what was written.
_DONTNEED, _PAGEOUT = 4, 21


@contextmanager
def bounded_mapped_pages(limit: int = RESIDENT_BYTES) -> Iterator[None]:
    """While it lasts, pages of mapped weights beyond `limit` bytes are given back to the system again and again; they
    are read anew from the file where they are needed. Without effect on systems other than Linux."""
    if not _MAPS.exists():
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_release, args=(stop, resident_file_bytes() + limit), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def resident_file_bytes() -> int:
    """Bytes of mapped files that are in memory, code of libraries included."""
    found = re.search(r"^RssFile:\s*(\d+) kB", _RESIDENT.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _release(stop: threading.Event, limit: int) -> None:
    libc = ctypes.CDLL(None)
    while not stop.wait(_SECONDS):
        if resident_file_bytes() <= limit:
            continue
        for start, size, writable in _mappings():
            # Both keep what was written: what cannot be written to has nothing.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _PAGEOUT if writable else _DONTNEED)


def _mappings() -> Iterator[tuple[int, int, bool]]:
    """Address, bytes and whether writable of every mapped file of weights."""
    for line in os.fsdecode(_MAPS.read_bytes()).splitlines():
        place, permissions, *_, path = (*line.split(maxsplit=5), "")[:6]
        if path.removesuffix(" (deleted)").endswith(_WEIGHTS):
            start, end = (int(part, 16) for part in place.split("-"))
            yield start, end - start, "w" in permissions
