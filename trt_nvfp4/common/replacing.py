"""Files that appear whole or not at all, whether they can appear where they are to, and folders to make them in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Folders of runs that go on, or were killed, are called this and eight characters (see `scratch`).
_PREFIX = ".trt-nvfp4-"
_SCRATCH = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")


def check_writable(folder: Path, destination: Path | None = None) -> None:
    """Before the work: raise OSError, naming the folder or the `destination` in it, where nothing can be written."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename = str(destination or folder)
        raise


def has_hard_links(folder: Path) -> bool:
    """Whether a file in `folder` can have two names. Raises OSError where nothing can be written there."""
    with scratch(folder) as temporary:
        (temporary / "one").touch()
        try:
            os.link(temporary / "one", temporary / "two")
        except OSError:
            return False
    return True


def link_or_copy(source: Path, destination: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy(source, destination)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make `folder`, and those above it, for the work inside; those made that hold nothing when it ends go again.

    Raises OSError, naming the folder, where it cannot be made or nothing can be written in it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # holds something, or was never made
                path.rmdir()


@contextlib.contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """Yield a new folder in `parent`, or where the system has its own, only for this user and of a name that nobody
    can know before; it is removed at the end, and by the next run if this one is killed. Raises OSError."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_left(parent)
    folder, lock = _locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(parent: Path) -> tuple[Path, int]:
    """A new folder, and its descriptor, by which it is locked as long as this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another run took it for one that was left
            continue
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def remove_left(parent: Path) -> None:
    """Remove from `parent` this user's scratch folders whose process has ended without doing so."""
    with contextlib.suppress(OSError):
        for name in filter(_SCRATCH.fullmatch, os.listdir(parent)):
            with contextlib.suppress(OSError):  # goes on, is another user's, or has just gone
                lock = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(parent / name, ignore_errors=True)
                finally:
                    os.close(lock)


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Yield a temporary path on the file system of `destination`; rename it over `destination` on success, remove it
    otherwise. It lies in a folder of its own, where nobody can have put a link."""
    try:
        with scratch(destination.parent) as folder:
            yield folder / destination.name
            os.replace(folder / destination.name, destination)
    except OSError as error:
        # Writes name no file.
        if error.filename is None or _PREFIX in str(error.filename):
            error.filename, error.filename2 = str(destination), None
        raise
