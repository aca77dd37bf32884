"""Statistics on disk: numbers in a JSON file, arrays in a folder beside it, one memory-mapped .npy file each.

`x.statistics.json` names the files of its folder `x.statistics/`. A save writes new files first, then replaces the
JSON, then removes what nothing names any more: whenever it is interrupted, the JSON and what it names fit together.
The state of a run that has not ended is another such JSON, `x.statistics.partial`, with its arrays in the same folder:
once they are final, they need not move.
"""

import errno
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import check_ordinary, read_json
from trt_nvfp4.common.replacing import replacing

Arrays = dict[str, dict[str, np.ndarray]]  # by tensor, then by kind of statistic
_FORMAT = "trt-nvfp4 activation statistics 4"


def is_statistics(path: Path) -> bool:
    """Whether `path` is named as a statistics file, and not as one of samples."""
    return path.name.endswith(".statistics.json")


def folder(path: Path) -> Path:
    """Where the arrays of the statistics file `path` lie."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}.arrays")


def state(path: Path) -> Path:
    """The state of the run that is to write the statistics file `path`. Its folder is the same."""
    return path.with_name(f"{folder(path).name}.partial")


def write(path: Path, content: Mapping[str, Any], arrays: Arrays) -> None:
    """Write all and remove the state, or leave what was there. Arrays that are mapped from the folder already stay as
    they are."""
    _write(path, content, arrays)
    remove_state(path)


def write_state(path: Path, content: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes only the state: the statistics stay."""
    _write(state(path), content, arrays)
    _remove_unnamed(path)


def remove_state(path: Path) -> None:
    state(path).unlink(missing_ok=True)
    _remove_unnamed(path)


def _write(path: Path, content: Mapping[str, Any], arrays: Arrays) -> None:
    files: dict[str, dict[str, str]] = {}
    for tensor, kinds in arrays.items():
        for kind, array in kinds.items():
            files.setdefault(tensor, {})[kind] = _stored(array, folder(path)) or _store(array, folder(path), kind)
    text = json.dumps({"format": _FORMAT, **content, "arrays": files}, indent=1)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n")


def _remove_unnamed(path: Path) -> None:
    """Remove the arrays that neither the statistics nor the state names; none, where one of these cannot be read."""
    named: set[Path] = set()
    for file in (path, state(path)):
        if not file.exists():
            continue
        try:
            named.update(array for kinds in _parse(file)[1].values() for array in kinds.values())
        except CalibrationError:
            return
    for old in folder(path).glob("*.npy"):
        if old not in named:
            old.unlink()
    if folder(path).is_dir() and not any(folder(path).iterdir()):
        folder(path).rmdir()


def read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The written content, arrays as private memory maps; raises CalibrationError for anything else."""
    content, files = _parse(path)
    return content, {tensor: {kind: _mapped(path, f) for kind, f in kinds.items()} for tensor, kinds in files.items()}


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Path]]]:
    """The content, and the files of the arrays."""
    try:
        content = read_json(path)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {_FORMAT!r}: calibrate again")
        files = {
            str(tensor): {str(kind): _array(path, file) for kind, file in kinds.items()}
            for tensor, kinds in content["arrays"].items()
        }
    except KeyError as error:
        raise CalibrationError(f"{path}: not a file of activation statistics: it lacks {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: not a file of activation statistics: {error}") from error
    return content, files


def _array(path: Path, name: str) -> Path:
    """Raises ValueError for a file that lies elsewhere."""
    inside(folder(path), name)
    return folder(path) / name


def _mapped(path: Path, file: Path) -> np.ndarray:
    if not file.exists():
        raise CalibrationError(
            f"{path}: not a file of activation statistics by itself: its arrays lie in the folder {file.parent} beside "
            f"it, and {file.name} is not there; keep both together"
        )
    try:
        check_ordinary(file)
        # Not `np.load`, which takes archives, too.
        array: np.ndarray = np.lib.format.open_memmap(file, mode="c")
    except Exception as error:  # a header is Python's syntax, whose readers raise many kinds
        raise CalibrationError(f"{file}: not an array of activation statistics: {error}") from error
    return array


def _stored(array: np.ndarray, folder: Path) -> str | None:
    """The file's name where `array` is the whole map of a file in `folder`."""
    if isinstance(array, np.memmap) and array.filename is not None:
        file = Path(array.filename)
        return file.name if file.parent == folder.absolute() else None
    return None


def _store(array: np.ndarray, folder: Path, kind: str) -> str:
    folder.mkdir(exist_ok=True)
    name = f"{kind}-{uuid.uuid4().hex}.npy"
    try:
        np.save(folder / name, array)
    except OSError as error:  # names no file, and NumPy's not even the reason
        code = error.errno or errno.ENOSPC
        raise OSError(code, os.strerror(code), str(folder / name)) from error
    return name
