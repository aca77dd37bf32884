"""FP8 E4M3 tensors (OCP 8-bit Floating Point 1.0): quantize and dequantize, one scale per tensor or per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops.number_formats import e4m3_round, e4m3_scale

from .finite import finite_amax, finite_amax_per_slice


def quantize(x: Tensor, scale: Tensor | float | None = None, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3, rounding to nearest even and saturating at 448.

    Args:
        x: any shape and float type.
        scale: the multiplier, positive and finite: a scalar, or one per channel; None: amax / 448 (at least 2^-126).
        axis: the channel axis; None: one scale for the tensor.

    Returns:
        values: float8_e4m3fn of x's shape.
        scale: float32, scalar or [x.shape[axis]].

    Raises:
        ValueError: x holds NaN or Inf (the message says where); the scale has the wrong shape or is not positive.
    """
    if axis is not None and not -x.dim() <= axis < x.dim():
        raise ValueError(f"fp8.quantize: axis {axis} is out of range for shape {tuple(x.shape)}")
    if scale is None:
        amax = finite_amax(x, "fp8.quantize") if axis is None else finite_amax_per_slice(x, axis, "fp8.quantize")
        scale = e4m3_scale(amax)
    else:
        finite_amax(x, "fp8.quantize")
    multiplier = _broadcast(torch.as_tensor(scale, dtype=torch.float32, device=x.device), x, axis, "fp8.quantize")
    return e4m3_round(x.float() / multiplier), multiplier.reshape(-1 if axis is not None else ())


def dequantize(
    values: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32, axis: int | None = None
) -> Tensor:
    """values * scale in float32, rounded to dtype. `scale` is a scalar, or [values.shape[axis]]."""
    multiplier = torch.as_tensor(scale, dtype=torch.float32, device=values.device)
    return (values.float() * _broadcast(multiplier, values, axis, "fp8.dequantize")).to(dtype)


def _broadcast(scale: Tensor, x: Tensor, axis: int | None, what: str) -> Tensor:
    expected = 1 if axis is None else x.shape[axis]
    if scale.numel() != expected or not ((scale > 0) & scale.isfinite()).all():
        raise ValueError(
            f"{what}: expected {expected} positive, finite scale(s) for axis {axis} of shape {tuple(x.shape)}, "
            f"found shape {tuple(scale.shape)}"
        )
    shape = [1] * x.dim()
    if axis is not None:
        shape[axis] = expected
    return scale.reshape(shape)
