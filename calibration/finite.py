"""The largest magnitude of a tensor, and where it stops being finite."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_amax(x: Tensor, what: str) -> Tensor:
    """max |x| (float32 scalar; 0 of an empty tensor). Raises ValueError, beginning with `what` and naming the first
    position, where x holds NaN or Inf or a value beyond float32. Makes no copy of x unless it raises."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    amax = torch.maximum(low.float().abs(), high.float().abs())
    if not amax.isfinite():
        position = tuple((~x.float().isfinite()).nonzero()[0].tolist())
        raise ValueError(f"{what}: x{list(position)} is {x[position].item()}; expected finite float32 values")
    return amax


def finite_amax_per_slice(x: Tensor, axis: int, what: str) -> Tensor:
    """max |x| over all axes but `axis` (float32 [x.shape[axis]]); raises as `finite_amax`."""
    finite_amax(x, what)
    others = [a for a in range(x.dim()) if a != axis % x.dim()]
    if not others:
        return x.float().abs()
    return torch.maximum(x.amax(others).float(), -x.amin(others).float())
