"""Folders and files that code is loaded from: nobody but this user and root may have written them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def own_folder(cache: Path, *names: str) -> Path:
    """The folder `names` in `cache`; what is missing of it is made for this user only.

    `cache` may be a folder for everybody if it is sticky, as /tmp is. Raises OSError where a folder cannot be made,
    belongs to another user than this one and root, or can be written by others.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    check_own(cache, sticky=True)
    folder = cache
    for name in names:
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        check_own(folder)
    return folder


def check_own(path: Path, sticky: bool = False) -> None:
    """Raise PermissionError where another user than this one and root owns the file or folder, or can write to it;
    with `sticky`, others may write to a folder where they cannot replace what is this user's."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}, whose code would be run", str(path))
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid())
    if others and not (sticky and found.st_mode & stat.S_ISVTX):
        raise PermissionError(
            errno.EPERM, "can be written by other users, whose code would be run (chmod go-w)", str(path)
        )
