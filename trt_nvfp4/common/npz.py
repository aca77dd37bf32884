"""Arrays in .npz files that anybody may have made. Bundles carry this module."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from .json_text import check_memory, check_ordinary


def read_npz(file: Path, copies: int = 1) -> dict[str, np.ndarray]:
    """The arrays by name. Raises ValueError for another kind of file, and where so many `copies` of its arrays do not
    fit into memory; OSError where there is no such file."""
    check_ordinary(file)
    try:
        # A small file may hold an array of zeros of any size.
        with zipfile.ZipFile(file) as archive:
            check_memory(copies * sum(entry.file_size for entry in archive.infolist()))
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy's, zipfile's and zlib's, for what is empty, cut off or another kind of file
        raise ValueError(str(error)) from error
