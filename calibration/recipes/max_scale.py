"""Max scaling: the largest value of each block becomes 6 (NVIDIA, "Introducing NVFP4 for Efficient and Accurate
Low-Precision Inference")."""

from torch import Tensor

from trt_nvfp4.calibration.recipes.scale_choice import ScaleChoice
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.plugins.ops.number_formats import BLOCK, E2M1_MAX, E4M3_MAX, e4m3_round


def choose(weight: Tensor, tensor_scale: Tensor, _: InputStatistics) -> Tensor:
    """In the order of operations of `nvfp4.quantize`, so that both agree bit by bit."""
    amax = weight.view(len(weight), -1, BLOCK).abs().amax(-1)
    return e4m3_round(amax / E2M1_MAX / tensor_scale)


MAX = ScaleChoice(frozenset(), E4M3_MAX, choose)
