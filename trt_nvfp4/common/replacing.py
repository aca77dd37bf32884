"""Files that appear whole or not at all, and whether they can appear where they are to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_writable(folder: Path, destination: Path | None = None) -> None:
    """Before the work: raise OSError, naming the folder or the `destination` in it, where nothing can be written."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename = str(destination or folder)
        raise


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
def replacing(destination: Path) -> Iterator[Path]:
    """Yield a temporary path beside `destination`; rename it over `destination` on success, remove it otherwise."""
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, destination)
    except OSError as error:
        # Writes name no file.
        if error.filename in (None, str(temporary)):
            error.filename = str(destination)
        raise
    finally:
        temporary.unlink(missing_ok=True)
