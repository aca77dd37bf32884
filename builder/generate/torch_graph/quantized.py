"""QuantizeLinear and DequantizeLinear in INT8 and FP8: per tensor, per axis and in blocks."""

import torch
from torch import Tensor

from .registry import operator
from .tensors import torch_type


def _spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """The scale, or zero point, of every element of x."""
    if block_size:
        return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.view([-1 if at == axis % x.dim() else 1 for at in range(x.dim())])


@operator("DequantizeLinear")
def dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    wide = x.float()
    if zero is not None and not zero.dtype.is_floating_point:
        wide = wide - _spread(zero, x, axis, block_size)
    found = wide * _spread(scale, x, axis, block_size).float()
    return found.to(torch_type(output_dtype) if output_dtype else scale.dtype)


@operator("QuantizeLinear")
def quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    dtype = torch_type(output_dtype) if output_dtype else torch.uint8 if zero is None else zero.dtype
    ratio = x.float() / _spread(scale, x, axis, block_size).float()
    if dtype.is_floating_point:
        if not saturate:
            raise NotImplementedError("QuantizeLinear without saturation")
        largest = torch.finfo(dtype).max
        return ratio.clamp(-largest, largest).to(dtype)
    limits = torch.iinfo(dtype)
    moved = ratio.round() if zero is None else ratio.round() + _spread(zero, x, axis, block_size)
    return moved.clamp(limits.min, limits.max).to(dtype)
