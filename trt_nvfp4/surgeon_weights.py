"""Float weights as an op's inputs: quantized matrices, their scales and biases, and zeros for what may be left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from trt_nvfp4.calibration.recipes import WeightQuantizer, parse
from trt_nvfp4.common import fp8
from trt_nvfp4.plugins.ops import OpDefinition
from trt_nvfp4.plugins.ops.number_formats import BLOCK, e4m3_scale, tile_scales
from trt_nvfp4.plugins.ops.weight_format import E4M3, NVFP4

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_SHARED = "shared_"


def projections(definition: OpDefinition) -> list[str]:
    """Prefixes of the inputs of the op's quantized matrices: gate_up, down; "" of NVFP4Linear."""
    names = [formal.name for formal in definition.inputs if formal.type == "tensor(int8)"]
    return [name.removesuffix("weight").rstrip("_") for name in names if name.endswith("weight")]


def names_of(definition: OpDefinition) -> set[str]:
    """Names of an op's arguments that are tensors: its inputs, and float weights and biases."""
    sources = {source for each in projections(definition) for source in _sources(each, gated=True)}
    return {formal.name for formal in definition.inputs} | sources | {f"{source}_bias" for source in sources}


def inputs_of(
    definition: OpDefinition, dtype: np.dtype, given: dict[str, Any], attributes: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The op's inputs that are made of float weights and biases, which are taken out of `given`; `dtype` is that of the
    activations. Flags that follow from them (gated, shared, shared_gated) are set in `attributes`.

    Raises:
        ValueError: A weight is missing, is not a matrix or stack of matrices, does not divide into blocks of 16, holds
        NaN
            or Inf, or gate and up differ in shape.
    """
    recipe, transposed = given.pop("recipe", "mse"), given.pop("transposed", False)
    found: dict[str, np.ndarray] = {}
    for projection in projections(definition):
        gated = _gate(projection) in given
        sources = _sources(projection, gated)
        if not any(is_float(given.get(source)) for source in sources):
            continue
        if missing := [source for source in sources if source not in given]:
            raise ValueError(f"lacks {', '.join(missing)}")
        weights = [_stack(source, given.pop(source), transposed) for source in sources]
        biases = [given.pop(f"{source}_bias", None) for source in sources]
        if definition.name == "NVFP4PersistentMLP":  # one layer may come without its dimension
            weights = [weight if weight.ndim == 3 else weight[None] for weight in weights]
        vectors = [
            torch.zeros(weight.shape[:-1]) if bias is None else as_torch(bias).float().reshape(weight.shape[:-1])
            for weight, bias in zip(weights, biases, strict=True)
        ]
        prefix = f"{projection}_" if projection else ""
        made = _e4m3(_interleaved(weights)) if _is_fp8(definition) else _nvfp4(_interleaved(weights), recipe)
        weight_prefix = prefix or "weight_"
        found |= {prefix + "weight" if part == "weight" else weight_prefix + part: each for part, each in made.items()}
        found[f"{prefix}bias"] = _interleaved([vector[..., None] for vector in vectors])[..., 0].numpy().astype(dtype)
        if projection in ("gate_up", "up") and "gated" in definition.attributes:
            attributes.setdefault("gated", int(gated))
        if projection.startswith(_SHARED):
            attributes.setdefault("shared", 1)
            attributes.setdefault("shared_gated", int("shared_gate" in given))
    return found


def defaults(
    definition: OpDefinition, shapes: Mapping[str, Sequence[Any]], dtype: np.dtype, attributes: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Values for inputs that may be left out, of the shapes of those that are there: scales of activations (0: found at
    run time), the correction of scores, the expert that all tokens pass, a norm that is switched off."""
    formals = [formal.name for formal in definition.inputs]
    fmt = E4M3 if _is_fp8(definition) else NVFP4
    stack = tuple(shapes.get("up_weight", ())[:-2]) if definition.name == "NVFP4PersistentMLP" else ()
    found = {scale.name: np.zeros(stack, np.float32) for scale in fmt.scales}
    if "router_logits" in shapes and "x" in shapes and isinstance(shapes["x"][-1], int):
        found["correction_bias"] = np.zeros(shapes["router_logits"][-1:], np.float32)
        types = {formal.name: formal.type for formal in definition.inputs}
        numpy_types = {"tensor(int8)": np.dtype(np.int8), "tensor(float)": np.dtype(np.float32)}
        smallest = fmt.smallest_shared_expert(shapes["x"][-1], bool(attributes.get("gated", 1)))
        found |= {name: np.zeros(shape, numpy_types.get(types[name], dtype)) for name, shape in smallest.items()}
    if stack and not attributes.get("norm", 1):
        found["norm_weight"] = np.ones((*stack, shapes["x"][-1]), dtype)
    return {name: value for name, value in found.items() if name in formals}


def is_float(value: Any) -> bool:
    """Whether it holds numbers that can be quantized: an array, a tensor of Torch, a constant of the graph."""
    if value is None or not (hasattr(value, "dtype") and (hasattr(value, "values") or not hasattr(value, "inputs"))):
        return False
    dtype = value.dtype
    return bool(dtype.is_floating_point) if isinstance(dtype, torch.dtype) else np.dtype(dtype) in _FLOATS


def as_torch(value: Any) -> torch.Tensor:
    """The values of an array, a tensor of Torch or a constant of the graph; bfloat16 as float32."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.asarray(getattr(value, "values", value))
    return torch.from_numpy(np.array(array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array))


def _is_fp8(definition: OpDefinition) -> bool:
    return definition.name.startswith("FP8")


def _gate(projection: str) -> str:
    # `shared_gate` is the op's own input, a vector.
    return "shared_gate_weight" if projection.startswith(_SHARED) else "gate"


def _sources(projection: str, gated: bool) -> list[str]:
    """The float weights whose rows interleave in a projection."""
    head = _SHARED if projection.startswith(_SHARED) else ""
    if not projection:
        return ["weight"]
    if projection.removeprefix(head) not in ("gate_up", "up"):
        return [projection]
    return [_gate(projection), f"{head}up"] if gated else [f"{head}up"]


def _stack(name: str, value: Any, transposed: bool) -> torch.Tensor:
    """[..., out_features, in_features] in float32."""
    weight = as_torch(value).float()
    if weight.ndim not in (2, 3):
        raise ValueError(f"{name} must be a matrix or a stack of matrices, found shape {list(weight.shape)}")
    weight = weight.mT.contiguous() if transposed else weight
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"{name} must have a multiple of {BLOCK} in_features, found shape {list(weight.shape)} of "
            "[out_features, in_features]; transposed=True takes [in_features, out_features], as MatMul has it"
        )
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} holds NaN or Inf")
    return weight


def _interleaved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row 0 of each, row 1 of each, ..."""
    if len({tuple(part.shape) for part in parts}) > 1:
        raise ValueError(f"gate and up must have one shape, found {[list(part.shape) for part in parts]}")
    return torch.stack(list(parts), dim=-2).flatten(-3, -2) if len(parts) > 1 else parts[0]


def _nvfp4(weight: torch.Tensor, recipe: str) -> dict[str, np.ndarray]:
    chosen = parse(recipe)
    quantize = WeightQuantizer(chosen, None, "cpu")
    found: dict[str, list[torch.Tensor]] = {"weight": [], "scales": [], "tensor_scale": []}
    for matrix in weight.reshape(-1, *weight.shape[-2:]):
        scale = chosen.tensor_scale(matrix.abs().max())
        values, scales = quantize(matrix, scale)
        found["weight"].append(values.view(torch.int8))
        found["scales"].append(tile_scales(scales).view(torch.int8))
        found["tensor_scale"].append(scale.reshape(()))
    return {name: _of_stack(weight, parts) for name, parts in found.items()}


def _e4m3(weight: torch.Tensor) -> dict[str, np.ndarray]:
    found: dict[str, list[torch.Tensor]] = {"weight": [], "scale": []}
    for matrix in weight.reshape(-1, *weight.shape[-2:]):
        scale = e4m3_scale(matrix.abs().amax(1))
        found["weight"].append(fp8.quantize(matrix, scale, axis=0).view(torch.int8))
        found["scale"].append(scale)
    return {name: _of_stack(weight, parts) for name, parts in found.items()}


def _of_stack(weight: torch.Tensor, parts: Sequence[torch.Tensor]) -> np.ndarray:
    stacked = torch.stack(list(parts)) if weight.ndim == 3 else parts[0]
    return stacked.contiguous().numpy()
