"""Files that are made once and kept in the user's cache, whole or not at all."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trt_nvfp4.plugins.compile.ownership import check_own, own_folder
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, cache_dir

#: What the folders begin with in which builds go on.
_BUILD = ".build"


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's file ``name``; ``build`` makes it if it is not there whole, one process at a time.

    Raises ToolchainError where the system refuses to keep it.
    """
    with place_of(name) as file:
        if not is_whole(file):
            _remove_left(file.parent)
            with FileLock(file.with_suffix(".lock")):
                if not is_whole(file):
                    build(file)
                    file.chmod(file.stat().st_mode & ~0o022)
        check_own(file)
    return file


@contextmanager
def place_of(name: str) -> Iterator[Path]:
    """The place of the cache's file ``name``, in a folder that exists. Raises ToolchainError for what the system
    refuses there."""
    file = cache_dir() / "plugins" / name
    try:
        # Whoever can write here, or owns the file, has their code run by this process.
        own_folder(cache_dir(), *file.parent.relative_to(cache_dir()).parts)
        yield file
    except OSError as error:
        raise ToolchainError(
            f"cannot keep {file}: {error}; set TRT_NVFP4_CACHE to a writable folder of your own"
        ) from error


@contextmanager
def building(file: Path) -> Iterator[Path]:
    """An empty folder to make ``file`` in, under its lock; a build that was killed may have left its own."""
    folder = file.with_name(f"{_BUILD}-{file.stem}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def keep(made: Path, file: Path) -> None:
    """Put what was made in its place, once it is on the disk: what ends the machine leaves all of it, or nothing."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(made, file)


def is_whole(file: Path) -> bool:
    """Whether the file is there, and, of a library or object, all of it: loading one that lost its end is a SIGBUS."""
    if not file.is_file() or file.suffix not in (".so", ".o"):
        return file.is_file()
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    # ELF's section headers, with which a linker ends the file.
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return file.stat().st_size >= int(start) + int(size) * int(count)


def _remove_left(cache: Path) -> None:
    """Remove the folders of builds that were killed: those whose lock nobody holds, and that are this user's."""
    for folder in cache.glob(f"{_BUILD}-*"):
        lock = cache / f"{folder.name[len(_BUILD) + 1 :]}.lock"
        if lock.is_file():
            with suppress(Timeout, PermissionError), FileLock(lock, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
