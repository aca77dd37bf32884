"""Texts, JSON, arrays and caches from files that anybody may have made, and whether such a file is one to read."""

from __future__ import annotations

import json
import resource
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Characters. Plans, reports and manifests of the largest models have a few millions; JSON takes up to twenty times as
# many bytes in memory.
_MOST = 64 << 20
# Bytes: kernels of the largest engines take a hundred million.
_MOST_OF_CACHE = 2 << 30


def check_ordinary(path: Path) -> int:
    """The bytes of an ordinary file. Raises ValueError for a device or a pipe, which may never end; OSError where there
    is no such file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("not an ordinary file")
    return found.st_size


def read_bytes(path: Path) -> bytes:
    """The content of a cache; b"" without one. Raises ValueError for a device or a pipe, and for a file larger than any
    cache; OSError where it cannot be read."""
    if not path.exists():
        return b""
    if (size := check_ordinary(path)) > _MOST_OF_CACHE:
        raise ValueError(f"it takes {size >> 20} MB, which no such file does")
    return path.read_bytes()


def check_memory(size: int) -> None:
    """Raises ValueError where `size` bytes are more than this process may still take."""
    try:
        import psutil
    except ImportError:  # bundles carry this module, and devices need not have it
        return
    free = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    if size > free:
        raise ValueError(f"it takes {size >> 20} MB of memory, and {max(0, free) >> 20} MB are free")


def read_npz(file: Path, copies: int = 1) -> dict[str, np.ndarray]:
    """The arrays by name. Raises ValueError for another kind of file, and where so many `copies` of its arrays do not
    fit into memory; OSError where there is no such file."""
    import numpy as np  # scripts that read no arrays need it not

    check_ordinary(file)
    try:
        # A small file may hold an array of zeros of any size.
        with zipfile.ZipFile(file) as archive:
            check_memory(copies * sum(entry.file_size for entry in archive.infolist()))
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy's, zipfile's and zlib's, for what is empty, cut off or another kind of file
        raise ValueError(str(error)) from error


def parse_json(text: str) -> Any:
    """The value that `text` describes. Raises ValueError for what is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError for what is not UTF-8, is not an ordinary file, or is larger than any such
    file; OSError where it cannot be read."""
    check_ordinary(path)
    with path.open(encoding="utf-8") as file:
        text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise ValueError(f"larger than {_MOST >> 20} MB, which no such file is")
    return text


def read_json(path: Path) -> Any:
    """The value that a file describes; raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path))
