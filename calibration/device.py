"""Where weights are quantized and Hessians summed."""

import torch


def device() -> torch.device:
    """The GPU, where Torch has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
