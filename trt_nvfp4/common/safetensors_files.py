"""The tensors of a safetensors file, or of a folder of them, read one by one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import check_ordinary, read_json

_LFS_POINTER = b"version https://git-lfs."
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFiles(Mapping[str, Path]):
    """The file of each tensor; only headers are read until `read` is called.

    Raises CalibrationError for files that are not safetensors, incomplete or missing, and for an index that names
    others than lie beside it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = _tensor_files(self.path)
        self._opened: dict[Path, Any] = {}  # kept: a model has thousands of tensors, and opening reads all their names

    def __getitem__(self, name: str) -> Path:
        return self._file_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows without reading the others."""
        with self._file(name) as file:
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        with self._file(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's type as safetensors names it, such as "BF16" or "F8_E4M3"."""
        with self._file(name) as file:
            return str(file.get_slice(name).get_dtype())

    def metadata(self, name: str) -> dict[str, str]:
        """The metadata of the file that holds a tensor."""
        with self._file(name) as file:
            return file.metadata() or {}

    @contextmanager
    def _file(self, name: str) -> Iterator[Any]:
        """The file that holds a tensor, opened."""
        if name not in self._file_of:
            raise CalibrationError(f"{self.path}: tensor {name} is missing")
        path = self._file_of[name]
        with _readable(path):
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt")
            yield self._opened[path]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        check_ordinary(file)
        yield
    except (SafetensorError, OSError, ValueError) as error:
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS_POINTER):
            raise CalibrationError(
                f"{file}: a Git LFS pointer in place of the file; fetch it with git lfs pull"
            ) from error
        raise CalibrationError(
            f"{file}: not a safetensors file, or an incomplete one (then download it again): {error}"
        ) from error


def _tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    if not path.exists():
        raise CalibrationError(f"{path}: no such file or folder")
    index, whole = path / _INDEX, path / _WHOLE
    if index.is_file():
        found = _indexed_files(index)
        if whole.is_file() and whole.resolve() not in found.values():
            raise CalibrationError(
                f"{path}: holds {_WHOLE} and {_INDEX}, which lists other files; keep only the checkpoint's own files "
                "in the folder"
            )
        return found
    if whole.is_file():  # what else lies there are variants of it, or other models
        return dict.fromkeys(_names(whole), whole)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"{path}: no *.safetensors file in this folder")
    tensors: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if name in tensors:
                raise CalibrationError(
                    f"{path}: tensor {name} is in {tensors[name].name} and in {file.name}; keep only the checkpoint's "
                    f"own files in the folder, or add its {_INDEX}"
                )
            tensors[name] = file
    return tensors


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        content = read_json(index)
    except ValueError as error:  # neither JSON nor UTF-8
        raise CalibrationError(f"{index}: not JSON: {error}; download it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CalibrationError(f"{index}: expected an object with a weight_map from tensor to file; download it again")
    files = sorted(set(weight_map.values()))
    try:
        places = {file: inside(index.parent, file) for file in files}
    except ValueError as error:
        raise CalibrationError(f"{index}: {error}") from error
    absent = [file for file, place in places.items() if not place.is_file()]
    if absent:
        raise CalibrationError(
            f"{index}: lists {', '.join(absent)}, not found beside it ({len(absent)} of {len(files)} files); "
            "download the whole checkpoint"
        )
    names = {file: _names(place) for file, place in places.items()}
    for name, file in weight_map.items():
        if name not in names[file]:
            raise CalibrationError(f"{index}: tensor {name} is not in {file}; download both again")
    return {name: places[file] for name, file in weight_map.items()}


def _names(file: Path) -> set[str]:
    with _readable(file), safe_open(file, framework="pt") as opened:
        return set(opened.keys())
