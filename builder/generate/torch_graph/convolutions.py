"""Convolutions, means over windows and norms over channels, which encoders of images and sound have."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MEANS = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


@operator("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    reach = [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilations, strict=True)]
    x = functional.pad(x, _padding(x, reach, strides, auto_pad, pads))
    return _CONVOLUTIONS[rank](x, weight, bias, stride=strides, dilation=dilations, groups=group)


@operator("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    count_include_pad: int = 0,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    rank = x.dim() - 2
    kernel, strides = list(kernel_shape), list(strides or [1] * rank)
    padding = _padding(x, kernel, strides, auto_pad, pads)
    mean = _MEANS[rank](functional.pad(x, padding), kernel, strides)
    if count_include_pad or not any(padding):
        return mean
    return mean / _MEANS[rank](functional.pad(torch.ones_like(x), padding), kernel, strides)


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _padding(
    x: Tensor, reach: Sequence[int], strides: Sequence[int], auto_pad: str, pads: Sequence[int] | None
) -> list[int]:
    """Padding for functional.pad: the last dimension first, before and behind."""
    rank = len(reach)
    found = list(pads or [0] * 2 * rank)
    if auto_pad.startswith("SAME"):
        sizes = zip(x.shape[2:], reach, strides, strict=True)
        missing = [max(0, (-(-size // step) - 1) * step + window - size) for size, window, step in sizes]
        less, more = [m // 2 for m in missing], [m - m // 2 for m in missing]
        found = less + more if auto_pad == "SAME_UPPER" else more + less
    return [amount for axis in reversed(range(rank)) for amount in (found[axis], found[rank + axis])]
