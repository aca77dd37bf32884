"""NVFP4 checkpoints: the packed tensors as published, without requantizing.

Two conventions are in use. ModelOpt (TensorRT Model Optimizer): `weight`, `weight_scale`, and `weight_scale_2`, a
multiplier. compressed-tensors (llm-compressor): `weight_packed`, `weight_scale`, and `weight_global_scale`, which
divides. Both pack the even element into the low nibble and hold row-major E4M3 block scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.plugins.ops.number_formats import BLOCK

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class NVFP4Weight:
    """One weight matrix, as `nvfp4.quantize` gives it: w = e2m1 * block_scale * tensor_scale."""

    packed: Tensor  # uint8 [N, K/2]
    block_scales: Tensor  # float8_e4m3fn [N, K/16], row-major
    tensor_scale: Tensor  # float32 [], a multiplier
    input_tensor_scale: Tensor | None  # float32 [], a multiplier: the activations' scale, where the checkpoint has one


class NVFP4Checkpoint(Mapping[str, NVFP4Weight]):
    """The NVFP4 weights of a safetensors file or folder, in either convention, by module name
    ("model.layers.0.mlp.up_proj"); nothing is read but the headers until a weight is asked for.

    Raises CalibrationError for files that are no safetensors or not there, for a file or folder without NVFP4 weights,
    and for tensors that are not NVFP4.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file_of = _tensor_files(self._path)
        self._opened: dict[Path, Any] = {}  # kept: a model has thousands of tensors, and opening reads all their names
        self._modules = {
            (module := name.removesuffix(".weight_scale")): _without_model(module)
            for name in sorted(self._file_of)
            if name.endswith(".weight_scale")
            and {f"{name}_2", name.removesuffix("scale") + "global_scale"} & self._file_of.keys()
        }
        if not self._modules:
            found = sorted({name.rpartition(".")[2] for name in self._file_of})
            raise CalibrationError(
                f"{path}: holds no NVFP4 weights: expected tensors weight_scale with weight_scale_2 (ModelOpt) or "
                f"weight_global_scale (compressed-tensors), found {', '.join(found[:8]) or 'no tensors'}"
            )
        for module in self._modules:
            if {f"{module}.weight_scale_2", f"{module}.weight_global_scale"} <= self._file_of.keys():
                raise CalibrationError(
                    f"{path}: {module} has weight_scale_2 (ModelOpt) and weight_global_scale (compressed-tensors); "
                    "write the checkpoint in one convention"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, module: str) -> NVFP4Weight:
        return self.rows(module, slice(None))

    def rows(self, module: str, rows: slice) -> NVFP4Weight:
        """Some of a weight's rows, without reading the others; `rows` in steps of one."""
        tensor_scale, input_scale = self.tensor_scales(module)
        self.shape(module)  # which says where values and block scales do not fit each other
        packed, block_scales = (self._tensor(name, rows) for name in (self._packed(module), f"{module}.weight_scale"))
        weight = NVFP4Weight(packed, block_scales, tensor_scale, input_scale)
        self._check(module, weight)
        return weight

    def shape(self, module: str) -> tuple[int, int]:
        """Of a weight, [N, K].

        Raises CalibrationError where the tensors of its values and block scales do not fit each other.
        """
        packed, scales = self._shape(self._packed(module)), self._shape(f"{module}.weight_scale")
        if len(packed) != 2 or scales != (packed[0], packed[1] * 2 // BLOCK):
            raise CalibrationError(
                f"{self._path}: {module} must hold values [N, K/2] and block scales [N, K/16], "
                f"found {packed} and {scales}"
            )
        return packed[0], 2 * packed[1]

    def _packed(self, module: str) -> str:
        return f"{module}.weight" if self._is_modelopt(module) else f"{module}.weight_packed"

    def tensor_scales(self, module: str) -> tuple[Tensor, Tensor | None]:
        """The tensor scales of a module's weight and input (float32 [], multipliers), without reading the weight;
        None for an input without one.

        Raises KeyError for a module that the checkpoint does not have, CalibrationError for one with AWQ's
        pre_quant_scale and for scales that are not one positive, finite number.
        """
        if module not in self._modules:
            raise KeyError(module)
        if f"{module}.pre_quant_scale" in self._file_of:
            raise CalibrationError(
                f"{self._path}: {module} has a pre_quant_scale, by which its input must be multiplied (AWQ), which "
                "the plugins do not; give a checkpoint without, such as ModelOpt's NVFP4_DEFAULT_CFG makes"
            )
        if self._is_modelopt(module):
            return self._scalar(f"{module}.weight_scale_2"), self._optional(f"{module}.input_scale")
        return (
            self._scalar(f"{module}.weight_global_scale", divides=True),
            self._optional(f"{module}.input_global_scale", divides=True),
        )

    def module(self, path: str) -> str | None:
        """The module that a model calls `path`, or None.

        Either name may have more in front, and components "model", which libraries put in different places, do not
        count ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj").
        """
        if path in self._modules or not path:
            return path or None
        wanted = _without_model(path)
        found = [module for module, own in self._modules.items() if own.endswith(wanted) or wanted.endswith(own)]
        return found[0] if len(found) == 1 else None

    def _is_modelopt(self, module: str) -> bool:
        return f"{module}.weight_scale_2" in self._file_of

    @contextmanager
    def _file(self, name: str) -> Iterator[Any]:
        """The file that holds a tensor, opened."""
        if name not in self._file_of:
            raise CalibrationError(f"{self._path}: tensor {name} is missing")
        path = self._file_of[name]
        with _readable(path):
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt")
            yield self._opened[path]

    def _tensor(self, name: str, rows: slice | None = None) -> Tensor:
        with self._file(name) as file:
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return tensor

    def _shape(self, name: str) -> tuple[int, ...]:
        with self._file(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def _scalar(self, name: str, divides: bool = False) -> Tensor:
        """A tensor scale as a multiplier; where it `divides`, its reciprocal."""
        tensor = self._tensor(name)
        expected = f"{self._path}: {name} must be one positive, finite number"
        if tensor.numel() != 1 or not tensor.is_floating_point():
            raise CalibrationError(f"{expected}, found shape {tuple(tensor.shape)} of {tensor.dtype}")
        value = tensor.float().reshape(())
        scale = value.reciprocal() if divides else value
        if not (scale > 0 and scale.isfinite()):
            raise CalibrationError(f"{expected}{', and so must 1 over it' if divides else ''}, found {value.item():g}")
        return scale

    def _optional(self, name: str, divides: bool = False) -> Tensor | None:
        return self._scalar(name, divides) if name in self._file_of else None

    def _check(self, module: str, weight: NVFP4Weight) -> None:
        packed, scales = weight.packed, weight.block_scales
        if packed.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
            raise CalibrationError(
                f"{self._path}: {module} must hold uint8 values and float8_e4m3fn block scales, "
                f"found {packed.dtype} and {scales.dtype}"
            )
        values = scales.float()
        if not (values >= 0).all():
            raise CalibrationError(f"{self._path}: {module}.weight_scale holds negative or NaN block scales")


def _without_model(module: str) -> str:
    return "." + ".".join(part for part in module.split(".") if part != "model")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CalibrationError(
            f"{file}: not a safetensors file, or an incomplete one (then download it again): {error}"
        ) from error


def _tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    if not path.exists():
        raise CalibrationError(f"{path}: no such file or folder")
    index = path / _INDEX
    if index.is_file():
        return _indexed_files(index)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"{path}: no *.safetensors file in this folder")
    tensors: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if name in tensors:
                raise CalibrationError(
                    f"{path}: tensor {name} is in {tensors[name].name} and in {file.name}; keep the checkpoint's own "
                    f"files alone in the folder, or add its {_INDEX}"
                )
            tensors[name] = file
    return tensors


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        content = parse_json(index.read_text(encoding="utf-8"))
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
