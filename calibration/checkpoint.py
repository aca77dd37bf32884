"""NVFP4 checkpoints: the packed tensors as published, without requantizing.

Two conventions are in use. ModelOpt (TensorRT Model Optimizer): `weight`, `weight_scale`, and `weight_scale_2`, a
multiplier. compressed-tensors (llm-compressor): `weight_packed`, `weight_scale`, and `weight_global_scale`, which
divides. Both pack the even element into the low nibble and hold row-major E4M3 block scales.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trt_nvfp4.calibration.checkpoint_files import CheckpointFiles
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.plugins.ops.number_formats import BLOCK


@dataclass(frozen=True)
class NVFP4Weight:
    """One weight matrix, as `nvfp4.quantize` gives it: w = e2m1 * block_scale * tensor_scale."""

    packed: Tensor  # uint8 [N, K/2]
    block_scales: Tensor  # float8_e4m3fn [N, K/16], row-major
    tensor_scale: Tensor  # float32 [], a multiplier
    input_tensor_scale: Tensor | None  # float32 [], a multiplier: the activations' scale, where the checkpoint has one


class NVFP4Checkpoint(Mapping[str, NVFP4Weight]):
    """The NVFP4 weights of a safetensors file or folder, in either convention, by module name
    ("model.layers.0.mlp.up_proj"); nothing is read but the headers until a weight is read.

    `of_model`: the folder is the model's own, of which other weights may be in other formats: it may have no NVFP4
    weights, and those whose inputs AWQ scales are left out, as are `changed` modules.

    Raises CalibrationError for missing or invalid safetensors files, for a file or folder without NVFP4 weights,
    and for tensors that are not NVFP4.
    """

    def __init__(self, path: str | Path, of_model: bool = False, changed: Collection[str] = ()) -> None:
        self.of_model = of_model
        self._files = CheckpointFiles(path)
        self._path = self._files.path
        self._tensor_scales: dict[str, tuple[Tensor, Tensor | None]] = {}
        #: Scales of activations that are not positive and finite, by their names: they were left out.
        self.unusable: dict[str, float] = {}
        self._modules = {
            (module := name.removesuffix(".weight_scale")): without_model(module)
            for name in sorted(self._files)
            if name.endswith(".weight_scale")
            and {f"{name}_2", name.removesuffix("scale") + "global_scale"} & self._files.keys()
        }
        if of_model:
            others = set(map(without_model, changed))
            self._modules = {
                module: name
                for module, name in self._modules.items()
                if f"{module}.pre_quant_scale" not in self._files and name not in others and self._is_nvfp4(module)
            }
        elif not self._modules:
            found = sorted({name.rpartition(".")[2] for name in self._files})
            raise CalibrationError(
                f"{path}: holds no NVFP4 weights: expected tensors weight_scale with weight_scale_2 (ModelOpt) or "
                f"weight_global_scale (compressed-tensors), found {', '.join(found[:8]) or 'no tensors'}"
            )
        for module in self._modules:
            if {f"{module}.weight_scale_2", f"{module}.weight_global_scale"} <= self._files.keys():
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
        packed, block_scales = (
            self._files.read(name, rows) for name in (self._packed(module), f"{module}.weight_scale")
        )
        weight = NVFP4Weight(packed, block_scales, tensor_scale, input_scale)
        if bool(block_scales.float().isnan().any()) and nvfp4.is_zero(packed, block_scales):
            return replace(weight, block_scales=torch.zeros_like(block_scales))
        self._check(module, weight)
        return weight

    def shape(self, module: str) -> tuple[int, int]:
        """The shape [N, K] of a weight.

        Raises CalibrationError where the tensors of its values and block scales do not fit each other.
        """
        packed, scales = self._files.shape(self._packed(module)), self._files.shape(f"{module}.weight_scale")
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
        None for an input without one, or with one that is 0, infinite or NaN, as of experts that saw no token; 1 for a
        weight of zeros whose own is.

        Raises KeyError for a module that the checkpoint does not have, CalibrationError for one with AWQ's
        pre_quant_scale and for scales that are not one number, of weights also positive and finite.
        """
        if module not in self._modules:
            raise KeyError(module)
        if f"{module}.pre_quant_scale" in self._files:
            raise CalibrationError(
                f"{self._path}: {module} has a pre_quant_scale, by which its input must be multiplied (AWQ), which "
                "the plugins do not; give a checkpoint without, such as ModelOpt's NVFP4_DEFAULT_CFG makes"
            )
        if module not in self._tensor_scales:
            divides = not self._is_modelopt(module)
            weight, activations = (
                ("weight_global_scale", "input_global_scale") if divides else ("weight_scale_2", "input_scale")
            )
            self._tensor_scales[module] = (
                self._weight_scale(module, f"{module}.{weight}", divides),
                self._input_scale(f"{module}.{activations}", divides),
            )
        return self._tensor_scales[module]

    def module(self, path: str) -> str | None:
        """The module that a model calls `path`, or None.

        Either name may have more in front, and components "model", which libraries put in different places, do not
        count ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj").
        """
        if path in self._modules or not path:
            return path or None
        wanted = without_model(path)
        found = [module for module, own in self._modules.items() if own.endswith(wanted) or wanted.endswith(own)]
        return found[0] if len(found) == 1 else None

    def _is_nvfp4(self, module: str) -> bool:
        """Whether rows are packed with a scale for 16 columns, as other formats with the same names do not have it."""
        if (packed := self._packed(module)) not in self._files:
            return False
        values, scales = self._files.shape(packed), self._files.shape(f"{module}.weight_scale")
        of_bytes = self._files.dtype(packed) == "U8" and self._files.dtype(f"{module}.weight_scale") == "F8_E4M3"
        return of_bytes and len(values) == len(scales) == 2 and values[1] * 2 == scales[1] * BLOCK

    def _is_modelopt(self, module: str) -> bool:
        return f"{module}.weight_scale_2" in self._files

    def _weight_scale(self, module: str, name: str, divides: bool) -> Tensor:
        """The tensor scale of a weight as a multiplier; where it `divides`, its reciprocal."""
        value, scale = self._scalar(name, divides)
        if scale > 0 and scale.isfinite():
            return scale
        self.shape(module)
        if nvfp4.is_zero(self._files.read(self._packed(module)), self._files.read(f"{module}.weight_scale")):
            return torch.ones(())
        raise CalibrationError(
            f"{self._path}: {name} must be one positive, finite number{', and so must 1 over it' if divides else ''}, "
            f"found {value:g}"
        )

    def _input_scale(self, name: str, divides: bool) -> Tensor | None:
        if name not in self._files:
            return None
        value, scale = self._scalar(name, divides)
        if scale > 0 and scale.isfinite():
            return scale
        self.unusable[name] = value
        return None

    def _scalar(self, name: str, divides: bool) -> tuple[float, Tensor]:
        """A tensor's one value, and the multiplier that it stands for."""
        tensor = self._files.read(name)
        if tensor.numel() != 1 or not tensor.is_floating_point():
            raise CalibrationError(
                f"{self._path}: {name} must be one positive, finite number, found shape {tuple(tensor.shape)} of "
                f"{tensor.dtype}"
            )
        value = tensor.float().reshape(())
        return value.item(), value.reciprocal() if divides else value

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


def without_model(module: str) -> str:
    """A module's path without components "model", which libraries put in different places; "." in front."""
    return "." + ".".join(part for part in module.split(".") if part != "model")
