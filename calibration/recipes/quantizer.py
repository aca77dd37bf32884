"""Weights to NVFP4 by a recipe, some rows at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from trt_nvfp4.calibration.recipes.gptq import GPTQ
from trt_nvfp4.calibration.recipes.quantized_inputs import least_squares
from trt_nvfp4.calibration.recipes.recipe import SCALES, Recipe, parse
from trt_nvfp4.calibration.recipes.threads import side_by_side
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.nvfp4 import finite_amax
from trt_nvfp4.plugins.ops import number_formats
from trt_nvfp4.plugins.ops.number_formats import BLOCK

_CPU_PART, _GPU_PART = 1 << 20, 1 << 24  # elements in work at a time, on a CPU by a thread


class QuantizedWeight(NamedTuple):
    """As `nvfp4.quantize` gives it, and as `nvfp4.dequantize` takes it."""

    packed: Tensor  # uint8 [N, K/2]
    block_scales: Tensor  # float8_e4m3fn [N, K/16], row-major
    tensor_scale: Tensor  # float32 []


class WeightQuantizer:
    """Quantizes rows of matrices [N, K] that share one input. Work that depends only on the input is done once.

    Raises CalibrationError: the recipe needs statistics that `inputs` lacks, or they are of another K.
    """

    def __init__(self, recipe: Recipe, inputs: InputStatistics | None, device: torch.device | str) -> None:
        self._inputs = InputStatistics() if inputs is None else inputs.only(recipe.needs, device)
        missing = sorted(kind for kind in recipe.needs if getattr(self._inputs, kind) is None)
        if missing:
            raise CalibrationError(f"recipe '{recipe}' needs {', '.join(missing)} of the input: give it samples")
        self._scales = SCALES[recipe.scales]
        self._gptq = self._target = None
        if recipe.quantized_inputs:
            cross, hessian = self._inputs["quantized_cross"], self._inputs["quantized_hessian"]
            self._target = least_squares(cross, hessian, self._inputs.damping(len(hessian)))
        if recipe.gptq:
            hessian = self._inputs["quantized_hessian" if recipe.quantized_inputs else "hessian"]
            self._gptq = GPTQ(hessian, self._inputs.damping(len(hessian)))

    def __call__(self, rows: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Packed values (uint8 [n, K/2]) and block scales (float8_e4m3fn [n, K/16]) of rows (float32 [n, K])."""
        if self._inputs.width not in (None, rows.shape[1]):
            raise CalibrationError(f"statistics of {self._inputs.width} channels for a weight of K = {rows.shape[1]}")
        if self._target is not None:
            rows = rows @ self._target
        if self._gptq is None:
            parts = torch.split(rows, max(1, (_GPU_PART if rows.is_cuda else _CPU_PART) // rows.shape[1]))
            rounded = side_by_side(lambda part: self._round(part, tensor_scale), parts)
            return torch.cat([packed for packed, _ in rounded]), torch.cat([scales for _, scales in rounded])

        def choose(columns: Tensor, block: int) -> Tensor:
            inputs = self._inputs.blocks(block, columns.shape[1] // BLOCK)
            return self._scales.choose(columns, tensor_scale, inputs)

        codes, scales = self._gptq.round(rows, tensor_scale, choose)
        return number_formats.pack(codes), scales

    def _round(self, rows: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Each value rounded by itself."""
        scales = self._scales.choose(rows, tensor_scale, self._inputs)
        return number_formats.pack(_nearest(rows, scales, tensor_scale)), scales


def quantize_weight(
    weight: Tensor,
    recipe: Recipe | str,
    statistics: InputStatistics | None = None,
    tensor_scale: Tensor | float | None = None,
) -> QuantizedWeight:
    """Quantize a weight [N, K] (any float type, K a multiple of 16) by a recipe, where it lies (CPU or GPU).

    `tensor_scale`: one positive, finite number, such as one that gate and up share; None: what the recipe takes for
    this weight.

    Raises:
        CalibrationError: the recipe is unknown, or needs statistics that are not there or of another K.
        ValueError: a shape that is not [N, K], K no multiple of 16, NaN or Inf, an invalid tensor scale.
    """
    recipe = parse(recipe)
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(
            f"quantize_weight: expected [N, K], K a multiple of {BLOCK}, found shape {tuple(weight.shape)}; "
            "pad K with zeros"
        )
    amax = finite_amax(weight, "quantize_weight")
    scale = recipe.tensor_scale(amax) if tensor_scale is None else torch.as_tensor(tensor_scale).float()
    if scale.numel() != 1 or not (scale > 0).all() or not scale.isfinite().all():
        raise ValueError(f"quantize_weight: tensor_scale must be one positive, finite number, found {tensor_scale}")
    scale = scale.reshape(()).to(weight.device)
    packed, block_scales = WeightQuantizer(recipe, statistics, weight.device)(weight.float(), scale)
    return QuantizedWeight(packed, block_scales, scale)


def _nearest(weight: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """E2M1 codes under given scales, as the kernels quantize activations: one float32 operation after another."""
    divisors = scales.float().unsqueeze(-1)
    blocks = weight.view(len(weight), -1, BLOCK) * (tensor_scale.reciprocal() / divisors)
    return number_formats.e2m1_encode(blocks).masked_fill_(divisors == 0, 0).flatten(-2)
