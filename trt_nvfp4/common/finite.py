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
