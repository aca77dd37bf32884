"""FP8 E4M3 matrices (OCP 8-bit Floating Point 1.0) with one scale per channel."""

from torch import Tensor

from trt_nvfp4.plugins.ops.number_formats import e4m3_round


def quantize(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """x / scale as float8_e4m3fn, rounded to nearest even and saturated at 448.

    `x` has any shape and float type, `scale` (float32 [x.shape[axis]], positive; see `e4m3_scale`) one multiplier per
    channel of `axis`.
    """
    shape = [1] * x.dim()
    shape[axis] = -1
    return e4m3_round(x.float() / scale.reshape(shape))
