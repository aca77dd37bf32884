"""MSE sweep: every E4M3 block scale from about 0.8 to 1.8 times the max scale is tried, and the best is kept.

Unweighted, the distance is the squared error of the weights. Weighted by E[x^2] per channel (`diagonal`) or by the
16x16 blocks of E[x x^T] (`local-hessian`), it approximates the squared error of the layer's output, as the diagonal and
the block diagonal of its Hessian do (LeCun, Denker, Solla, "Optimal Brain Damage", 1990; Frantar, Alistarh, "Optimal
Brain Compression", 2022). The range of the sweep and the local Hessian follow NVIDIA's TensorRT Model Optimizer
(`mse` and `local_hessian` calibration of static NVFP4 block scales).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trt_nvfp4.calibration.recipes.block_search import scale_codes, search
from trt_nvfp4.calibration.recipes.scale_choice import ScaleChoice
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.plugins.ops.number_formats import BLOCK, E2M1_MAX

# Around the code of the max scale, itself first; E4M3 has eight codes per power of two.
CODE_OFFSETS = (0, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)
_LARGEST_CODE = 126  # 448
# The tensor scale maps the largest block here, so that its scale may rise as well.
_LARGEST = 256.0


def candidates(magnitudes: Tensor, tensor_scale: Tensor) -> Iterator[Tensor]:
    """The codes around the max scale."""
    codes = scale_codes(magnitudes, E2M1_MAX, tensor_scale)
    for offset in CODE_OFFSETS:
        yield (codes + offset).clamp_(1, _LARGEST_CODE)


def choose(weight: Tensor, tensor_scale: Tensor, _: InputStatistics) -> Tensor:
    """By squared error."""
    return search(weight, tensor_scale, candidates)


def choose_diagonal(weight: Tensor, tensor_scale: Tensor, inputs: InputStatistics) -> Tensor:
    """By squared error weighted with E[x^2]."""
    importance = inputs["mean_square"]
    # Damped: channels that the samples left at zero still count a little.
    importance = (importance + inputs.damping(1) * importance.mean()).view(-1, BLOCK, 1)

    def distance(errors: Tensor, first: int) -> Tensor:
        return errors.square_().mul_(importance[first : first + len(errors)]).sum(1)

    return search(weight, tensor_scale, candidates, distance)


def choose_local(weight: Tensor, tensor_scale: Tensor, inputs: InputStatistics) -> Tensor:
    """By e^T E[x_b x_b^T] e of a block's errors e."""
    grams = inputs["block_gram"]
    mean = grams.diagonal(dim1=1, dim2=2).mean()
    grams = grams + inputs.damping(BLOCK) * mean * torch.eye(BLOCK, device=grams.device)

    def distance(errors: Tensor, first: int) -> Tensor:
        return torch.bmm(grams[first : first + len(errors)], errors).mul_(errors).sum(1)

    return search(weight, tensor_scale, candidates, distance)


MSE = ScaleChoice(frozenset(), _LARGEST, choose)
DIAGONAL = ScaleChoice(frozenset({"mean_square"}), _LARGEST, choose_diagonal)
LOCAL_HESSIAN = ScaleChoice(frozenset({"block_gram"}), _LARGEST, choose_local)
