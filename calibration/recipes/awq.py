"""AWQ: channels that matter are scaled up before rounding, and what precedes makes them smaller by the same factor.

W x = (W diag(s)) (diag(1/s) x): 1/s is folded into the weights that x comes from, so nothing is added at run time, and
s = rms(x)^alpha, alpha searched on a grid for the least error of the output (Lin et al., "AWQ: Activation-aware Weight
Quantization for LLM Compression and Acceleration", arXiv 2306.00978, section 3.2). The error is that of all matrices
that read x, by the 16x16 Gram matrices of x, with the block scales of the recipe and rounding to nearest.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trt_nvfp4.calibration.recipes.quantizer import quantize_weight
from trt_nvfp4.calibration.recipes.recipe import Recipe
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.common import nvfp4
from trt_nvfp4.plugins.ops.number_formats import BLOCK

ALPHAS = tuple(step / 20 for step in range(20))  # 0 does not scale
# Rows of each matrix that the search looks at, evenly spread.
SEARCHED_ROWS = 512
# Channels below this share of the mean E[x^2], dead ones among them, are scaled as if they had it.
_LEAST = 1e-4


def channel_scales(readers: Sequence[tuple[Tensor, InputStatistics]], recipe: Recipe) -> Tensor:
    """s (float32 [K], on the matrices' device) for an input x, from the matrices [N, K] that read it, each with the
    statistics of x as it sees it (`recipe.needs`). Ones, where no scaling is better.

    Raises CalibrationError: statistics are missing, or of another K.
    """
    rounding = replace(recipe, awq=False, gptq=False)
    readers = [
        (weight[:: -(-len(weight) // SEARCHED_ROWS)].float(), inputs.only(recipe.needs, weight.device))
        for weight, inputs in readers
    ]
    squares = torch.stack([inputs["block_gram"].diagonal(dim1=1, dim2=2).flatten() for _, inputs in readers]).mean(0)
    rms = squares.clamp_min(_LEAST * squares.mean()).sqrt()
    if not rms.max() > 0:  # an input that is always zero
        return torch.ones_like(rms)
    best, least = torch.ones_like(rms), torch.inf
    for alpha in ALPHAS:
        scales = rms**alpha
        scales /= (scales.max() * scales.min()).sqrt()
        loss = sum(_output_error(weight, inputs, scales, rounding) for weight, inputs in readers)
        if loss < least:
            best, least = scales, loss
    return best


def _output_error(weight: Tensor, inputs: InputStatistics, scales: Tensor, recipe: Recipe) -> float:
    """E|W x - W' x|^2 within blocks, of W' = NVFP4(W diag(s)) diag(1/s)."""
    rounded = nvfp4.dequantize(*quantize_weight(weight * scales, recipe, inputs.divided(scales)))
    blocks = (rounded / scales - weight).view(len(weight), -1, BLOCK).transpose(0, 1)
    return (blocks @ inputs["block_gram"]).mul_(blocks).sum().item()
