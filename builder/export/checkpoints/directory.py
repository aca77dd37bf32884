"""The weights of a quantized Hugging Face directory as its model multiplies by them, dequantized one by one."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export.checkpoints.bitsandbytes import bitsandbytes_4bit
from trt_nvfp4.builder.export.checkpoints.fp4 import gpt_oss_mxfp4, mxfp4, nvfp4
from trt_nvfp4.builder.export.checkpoints.packed_integers import awq, gptq, modelopt_int4, pack_quantized
from trt_nvfp4.builder.export.checkpoints.parts import Parts, quantized_parts
from trt_nvfp4.builder.export.checkpoints.scaled import bitsandbytes_int8, row_scales, scaled
from trt_nvfp4.builder.export.checkpoints.settings import Settings, quantization_config
from trt_nvfp4.builder.export.checkpoints.weight import QuantizedWeight
from trt_nvfp4.builder.export.deferred import DeferredTensor
from trt_nvfp4.calibration.checkpoint_files import CheckpointFiles
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.graph_passes.weights.published_fp8 import PublishedFP8

# Each says by a weight's parts whether it reads them. Another format is read by another function here.
READERS: tuple[Callable[[Parts], QuantizedWeight | None], ...] = (
    nvfp4,
    mxfp4,
    gpt_oss_mxfp4,
    scaled,
    bitsandbytes_int8,
    bitsandbytes_4bit,
    pack_quantized,
    gptq,
    awq,
    modelopt_int4,
)
READ_FORMATS = (
    "NVFP4 (ModelOpt, compressed-tensors), MXFP4, FP8, MXFP8, INT8, packed integers (compressed-tensors, GPTQ, AWQ, "
    "ModelOpt) and bitsandbytes"
)
INSTEAD = "give the directory of the original model in 16 or 32 bits"
# Scales of cached keys and values by ModelOpt, compressed-tensors and vLLM; and of attention's other operands.
_CACHE_SCALE = re.compile(
    r"(?P<attention>.*?)(\.((?P<proj>[kv])|qkv)_proj|\.attn)?\.((?P<of>kv|k|v)_(cache_)?scale|output_scale)"
)
_CACHE_BIAS = re.compile(r".*\.(k_proj\.k|v_proj\.v)_bias")
_OPERAND_SCALE = re.compile(r".*\.(q_scale|prob_output_scale)")
_SIXTEEN_BITS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPES = {
    **_SIXTEEN_BITS,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class QuantizedDirectory:
    """The contents of a directory's safetensors: quantized weights by the name that they have in the model, scales of
    the key-value caches, float32 [1] or [kv_heads], by attention module and "k" or "v", the format of those caches, and
    everything else, `plain`, by name.

    Raises ModelFaultError: a format that is not read; tensors that do not fit together.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._files = CheckpointFiles(directory)
        self.weights = {parts.weight: _read_by(parts, directory) for parts in quantized_parts(self._files, settings)}
        taken = {key for weight in self.weights.values() for key in weight.parts.keys.values()}
        self.cache_scales: dict[tuple[str, str], Tensor] = {}
        self.cache_format = settings.cache or "FP8"
        for key in self._files.keys() - taken:
            if self._is_cache_scale(key):
                taken.add(key)
            elif _CACHE_BIAS.fullmatch(key):
                taken.add(key)
                self.cache_format = "numbers with biases"
        self.plain = [key for key in self._files if key not in taken]
        self.failure: BuilderError | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it holds quantized weights, or scales of caches."""
        return bool(self.weights or self.cache_scales)

    @property
    def is_plain(self) -> bool:
        """Whether all that it holds is in 16 bits or more."""
        return bool(self.plain) and all(self._files.dtype(key) in _SIXTEEN_BITS for key in self.plain)

    @property
    def formats(self) -> dict[str, int]:
        """How many weights there are of each format, the most frequent first."""
        found: dict[str, int] = {}
        for weight in self.weights.values():
            found[weight.format] = found.get(weight.format, 0) + 1
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def state_dict(self) -> dict[str, Any]:
        """For each weight an object that becomes a tensor, as it is dequantized, when it is indexed with `...`."""
        return {
            **{key: _WhenIndexed(partial(self._files.read, key)) for key in self.plain},
            **{name: _WhenIndexed(weight.read) for name, weight in self.weights.items()},
        }

    def deferred(self, dtype: torch.dtype) -> dict[str, Any]:
        """The state dict for transformers: each weight as a deferred tensor when it is indexed, quantized ones in
        `dtype`.

        Where one cannot be read meanwhile, `failure` says why: transformers only says that it could not be loaded.
        """
        shapes = {
            **{key: (self._files.shape(key), self._files.dtype(key)) for key in self.plain},
            **{name: (weight.shape, "") for name, weight in self.weights.items()},
        }
        state: dict[str, Any] = {}
        for name, (shape, stated) in shapes.items():
            weight = self.weights.get(name)
            read = partial(
                self._told, partial(self._files.read, name) if weight is None else partial(_cast, weight, dtype)
            )
            of = dtype if weight is not None else _TYPES.get(stated)
            state[name] = _WhenIndexed(read if of is None else partial(DeferredTensor.of, shape, of, read))
        return state

    def _told(self, read: Callable[[], Tensor]) -> Tensor:
        """Raises ModelFaultError where a tensor cannot be read."""
        try:
            return read()
        except CalibrationError as error:
            self.failure = ModelFaultError(str(error))
            raise self.failure from error

    def fp8(self) -> PublishedFP8:
        """The scales of FP8 weights that FP8 layers can take: those with one per tensor or row."""
        rows: dict[str, Tensor] = {}
        inputs: dict[str, float] = {}
        unusable: dict[str, float] = {}
        for name, weight in self.weights.items():
            if (scales := row_scales(weight)) is not None:
                module = name.removesuffix(".weight")
                rows[module] = scales
                if "input_scale" not in weight.parts.keys:
                    continue
                if (of_input := weight.parts.unchecked_scale("input_scale")).numel() == 1:
                    usable = of_input > 0 and of_input.isfinite()
                    (inputs if usable else unusable)[module] = float(of_input)
        return PublishedFP8(rows, inputs, unusable)

    @property
    def dtype(self) -> torch.dtype:
        """The widest type of the weights that are not quantized; for configurations that state none."""
        found = {self._files.dtype(key) for key in self.plain}
        return next((dtype for name, dtype in _SIXTEEN_BITS.items() if name in found), torch.bfloat16)

    def _is_cache_scale(self, key: str) -> bool:
        """Whether it is a scale of what attention computes with; those of caches are kept."""
        match = _CACHE_SCALE.fullmatch(key)
        if match is None or not (of := match["of"] or match["proj"]):
            return _OPERAND_SCALE.fullmatch(key) is not None
        shape = self._files.shape(key)
        if sum(size != 1 for size in shape) > 1 or 0 in shape:  # one, or one per head
            return False
        scale = self._files.read(key).float().reshape(-1)
        if not ((scale > 0) & scale.isfinite() & scale.reciprocal().isfinite()).all():
            raise ModelFaultError(
                f"{self._files.path}: {key} must hold positive scales of the cache, found {scale.min():g} to "
                f"{scale.max():g}; download the checkpoint again, or give the original model"
            )
        for which in of:
            self.cache_scales[match["attention"], which] = scale
        return True


def _cast(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight.read().to(dtype)


class _WhenIndexed:
    """Makes a tensor each time that it is indexed, as transformers does with slices of safetensors."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> Tensor:
        return self._read()


def quantized_directory(directory: Path) -> QuantizedDirectory | None:
    """The directory's quantized weights; None where it holds and states none, or has no safetensors.

    Raises ModelFaultError for a format that is not read, and for files that cannot be read.
    """
    found = held_tensors(directory)
    return found if found is not None and found.is_quantized else None


def held_tensors(directory: Path) -> QuantizedDirectory | None:
    """The contents of the directory's safetensors, quantized or not; None without any. Raises as
    `quantized_directory`."""
    try:
        config = read_config(directory)
        settings = Settings.of(directory, config if isinstance(config, Mapping) else {})
    except ValueError as error:
        raise ModelFaultError(f"{directory}: a configuration is not JSON ({error})") from error
    if not isinstance(config, Mapping):
        raise ModelFaultError(f"{directory / 'config.json'}: expected an object; download it again")
    stated = quantization_config(config)
    if stated is not None and (transforms := stated.get("transform_config")):
        raise ModelFaultError(
            f"{directory}: its weights are quantized behind transforms ({', '.join(_groups_of(transforms))}), which "
            f"activations would have to go through; {INSTEAD}"
        )
    method = None if stated is None else stated.get("quant_method", "a method without a name")
    if not any(directory.glob("*.safetensors")):
        if method is not None:
            raise ModelFaultError(
                f"{directory}: its weights are quantized, by {method}, and not in safetensors files; no others are "
                f"read; {INSTEAD}"
            )
        return None
    try:
        found = QuantizedDirectory(directory, settings)
    except CalibrationError as error:
        raise ModelFaultError(str(error)) from error
    if not found.is_quantized and method is not None and not (stated and stated.get("dequantize") and found.is_plain):
        raise ModelFaultError(
            f"{directory}: its weights are quantized, by {method}, in a format that is not read, which is one of "
            f"{READ_FORMATS}; {INSTEAD}"
        )
    return found


def _groups_of(transforms: Any) -> list[str]:
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    return [json.dumps(str(name)) for name in groups] if isinstance(groups, Mapping) else ["transform_config"]


def _read_by(parts: Parts, directory: Path) -> QuantizedWeight:
    for reader in READERS:
        if (weight := reader(parts)) is not None:
            return weight
    held = ", ".join(
        f"{json.dumps(key)} ({parts.dtype(role)} {list(parts.shape(role))})" for role, key in sorted(parts.keys.items())
    )
    method = f" by {parts.settings.method}" if parts.settings.method else ""
    raise ModelFaultError(
        f"{directory}: its weights are quantized{method}, and those of {json.dumps(parts.weight)} in a format that is "
        f"not read: its files hold {held}. Read are {READ_FORMATS}; {INSTEAD}"
    )
