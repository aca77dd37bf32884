"""Four over six: the largest value of each block becomes 6 or 4, whichever leaves the smaller squared error.

Values between 4 and 6 are the ones that E2M1 rounds worst; scaled to 4, a block has none (Cook et al., "Four Over Six:
More Accurate NVFP4 Quantization with Adaptive Block Scaling", arXiv 2512.02010). Scales to 4 are 1.5 times those to 6,
so the tensor scale maps the largest block to 256, as in the paper: 256 and 384 are E4M3 values.
"""

from collections.abc import Iterator

from torch import Tensor

from trt_nvfp4.calibration.recipes.block_search import scale_codes, search
from trt_nvfp4.calibration.recipes.scale_choice import ScaleChoice
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics


def candidates(magnitudes: Tensor, tensor_scale: Tensor) -> Iterator[Tensor]:
    """To 6, to 4."""
    yield scale_codes(magnitudes, 6.0, tensor_scale)
    yield scale_codes(magnitudes, 4.0, tensor_scale)


def choose(weight: Tensor, tensor_scale: Tensor, _: InputStatistics) -> Tensor:
    """The better of the two by squared error."""
    return search(weight, tensor_scale, candidates)


FOUR_OVER_SIX = ScaleChoice(frozenset(), 256.0, choose)
