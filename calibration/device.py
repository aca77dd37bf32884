"""Where weights are quantized and Hessians summed."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """The GPU, where Torch has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
