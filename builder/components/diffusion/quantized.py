"""NVFP4 weights of denoisers as they are published: in ModelOpt's layout or ComfyUI's, by diffusers' names or those of
the network's authors.

ComfyUI's files mark layers by `comfy_quant` or in their metadata; the first of two values is in a byte's high half, and
block scales lie in tiles of 128x4. Authors' names are changed by diffusers' own functions for single files: what these
do to rows (fused q, k, v are taken apart) is done to values, block scales and scales alike.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_nvfp4.builder.errors import ModelFaultError, first_line
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.safetensors_files import SafetensorsFiles
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tiled_shape, untile_scales

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_SCALE, _INPUT = ".weight_scale_2", ".input_scale"
_PARTS = (".weight", ".weight_scale", _SCALE, _INPUT, ".comfy_quant")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Attribute of a module that `load_nvfp4` made: its published weights by module name.
PUBLISHED = "published_nvfp4"


@dataclass(frozen=True)
class PublishedNVFP4:
    """A weight: packed uint8 [N, K/2], low half first; E4M3 block scales [N, K/16]; and for each row the tensor's scale
    and that of its input, float32 [N, 1], NaN where the input has no scale."""

    packed: Tensor
    block_scales: Tensor
    scale: Tensor
    input_scale: Tensor

    def values(self) -> Tensor:
        """float32 [N, K]."""
        return nvfp4.dequantize(self.packed, self.block_scales, torch.ones(())) * self.scale

    def tensors(self, module: str) -> dict[str, Tensor] | None:
        """As ModelOpt writes them; None for rows with several scales."""
        if len(torch.unique(self.scale)) != 1:
            return None
        found = {".weight": self.packed, ".weight_scale": self.block_scales, _SCALE: self.scale[0, 0]}
        # An input without a scale of its own has none here either: no number stands for it.
        if len(torch.unique(self.input_scale)) == 1:
            found[_INPUT] = self.input_scale[0, 0]
        return {module + end: tensor.contiguous() for end, tensor in found.items()}


def is_nvfp4(files: SafetensorsFiles) -> bool:
    """Whether the files hold NVFP4 weights in a layout that is read here."""
    return any(name.endswith(_SCALE) for name in files)


def plain_dtype(files: SafetensorsFiles) -> torch.dtype:
    """The type of most tensors that belong to no quantized weight."""
    modules = _modules(files)
    plain = Counter(files.dtype(name) for name in files if name.rpartition(".")[0] not in modules)
    return next((_DTYPES[name] for name, _ in plain.most_common() if name in _DTYPES), torch.bfloat16)


def load_nvfp4(folder: Path, cls: Any, config: Mapping[str, Any]) -> torch.nn.Module:
    """diffusers' module `cls` with what its folder's weights stand for, in the type of the others; it keeps the
    published ones. Raises ModelFaultError for tensors that do not fit each other or the configuration."""
    from accelerate import init_empty_weights

    files = SafetensorsFiles(folder)
    published = {module: _read(files, module) for module in _modules(files)}
    taken = {module + end for module in published for end in _PARTS}
    plain = {_bare(name): files.read(name) for name in files if name not in taken}
    published = {_bare(module): weight for module, weight in published.items()}
    with init_empty_weights(include_buffers=False):
        module = cls.from_config({key: value for key, value in config.items() if key != "quantization_config"})
    wanted = module.state_dict().keys()
    dtype = plain_dtype(files)
    renamed = _renaming(cls, wanted, {**plain, **{f"{name}.weight": w.packed for name, w in published.items()}}, config)
    # In the module's type at once: float32 values of a large denoiser would take twice its memory.
    state = renamed({**plain, **{f"{name}.weight": weight.values().to(dtype) for name, weight in published.items()}})
    found: dict[str, Any] = {}
    for part in ("packed", "block_scales", "scale", "input_scale"):
        found[part] = renamed({**plain, **{f"{name}.weight": getattr(w, part) for name, w in published.items()}})
    exact = set(getattr(cls, "_keep_in_fp32_modules", None) or ())
    state = {
        name: tensor.to(torch.float32 if exact & set(name.split(".")) else dtype) for name, tensor in state.items()
    }
    if missing := sorted(wanted - state.keys()):
        raise ModelFaultError(f"{folder}: the files lack {len(missing)} of its weights, {missing[0]} for one")
    if unknown := sorted(state.keys() - wanted):
        raise ModelFaultError(
            f"{folder}: the files hold {len(unknown)} tensors that {cls.__name__} lacks, {unknown[0]} for one"
        )
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ModelFaultError(f"{folder}: weights do not fit config.json: {first_line(error)}") from error
    names = [name for name, tensor in found["packed"].items() if tensor.dtype == torch.uint8]
    kept = {name.removesuffix(".weight"): PublishedNVFP4(*(parts[name] for parts in found.values())) for name in names}
    setattr(module, PUBLISHED, kept)
    loaded: torch.nn.Module = module.eval().requires_grad_(False)
    return loaded


def held(module: torch.nn.Module, prefix: str) -> dict[str, Tensor]:
    """The published weights that the module still has (an adapter may have changed others), as ModelOpt writes them."""
    found: dict[str, Tensor] = {}
    for name, weight in getattr(module, PUBLISHED, {}).items():
        current = module.get_parameter(f"{name}.weight")
        if torch.equal(current, weight.values().to(current.dtype)):
            found |= weight.tensors(f"{prefix}{name}") or {}
    return found


def _modules(files: SafetensorsFiles) -> set[str]:
    return {name.removesuffix(_SCALE) for name in files if name.endswith(_SCALE)}


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read(files: SafetensorsFiles, module: str) -> PublishedNVFP4:
    packed, stored = files.read(f"{module}.weight"), files.read(f"{module}.weight_scale")
    if packed.dtype != torch.uint8 or packed.dim() != 2 or stored.dtype != torch.float8_e4m3fn:
        raise ModelFaultError(
            f"{files.path}: {module} must hold uint8 [N, K/2] and float8_e4m3fn scales, found {packed.dtype} "
            f"{list(packed.shape)} and {stored.dtype}"
        )
    rows, blocks = packed.shape[0], packed.shape[1] * 2 // BLOCK
    tiled = _is_comfy(files, module)
    shape = tiled_shape(rows, blocks) if tiled else (rows, blocks)
    if stored.numel() != shape[0] * shape[1] or packed.shape[1] * 2 % BLOCK:
        raise ModelFaultError(
            f"{files.path}: {module}.weight_scale must hold {list(shape)} block scales of {list(packed.shape)} bytes, "
            f"found {list(stored.shape)}"
        )
    block_scales = stored.reshape(shape)
    if tiled:
        packed, block_scales = packed << 4 | packed >> 4, untile_scales(block_scales, rows, blocks)
    if not (block_scales.float() >= 0).all():
        raise ModelFaultError(f"{files.path}: {module}.weight_scale holds negative or NaN scales")
    scale = _scalar(files, module + _SCALE)
    if scale is None:
        raise ModelFaultError(f"{files.path}: {module}{_SCALE} must be one positive, finite number")
    of_input = _scalar(files, module + _INPUT) if module + _INPUT in files else None
    every = [torch.full((rows, 1), torch.nan if value is None else value) for value in (scale, of_input)]
    return PublishedNVFP4(packed, block_scales, *every)


def _scalar(files: SafetensorsFiles, name: str) -> float | None:
    """A positive, finite number; None for anything else."""
    tensor = files.read(name)
    value = float(tensor.float()) if tensor.numel() == 1 else torch.nan
    return value if 0 < value < torch.inf else None


def _is_comfy(files: SafetensorsFiles, module: str) -> bool:
    """Raises ModelFaultError for ComfyUI's other formats."""
    if f"{module}.comfy_quant" in files:
        text = bytes(files.read(f"{module}.comfy_quant").tolist())
    else:
        text = files.metadata(f"{module}.weight").get("_quantization_metadata", "{}").encode()
    try:
        stated = json.loads(text)
        layer = stated if "layers" not in stated else stated["layers"].get(module, stated["layers"].get(_bare(module)))
        if not layer:
            return False
        of = layer["format"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFaultError(f"{files.path}: {module} has an invalid description ({first_line(error)})") from error
    if of != "nvfp4":
        raise ModelFaultError(f"{files.path}: {module} is in the format {of!r}, expected nvfp4; give the original")
    return True


def _renaming(
    cls: Any, wanted: Any, given: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The function that gives tensors diffusers' names."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if given.keys() <= wanted or wanted <= given.keys():
        return lambda tensors: tensors
    known: Any = SINGLE_FILE_LOADABLE_CLASSES.get(cls.__name__)
    if known is None:
        return lambda tensors: tensors
    convert: Callable[..., dict[str, Tensor]] = known["checkpoint_mapping_fn"]
    return lambda tensors: convert(dict(tensors), config=config)
