"""Which channels of an activation are worth a second look in NVFP4, and their place: behind the others.

Quantizers repeat the last channels (the ops' attribute `residual_channels`), so that weights take theirs twice as they
lie, whole blocks of 16. Heavy channels that share blocks also leave those of others. The kind of ARCQuant (Meng et al.,
arXiv 2601.07475), which ranks channels by their largest magnitude.
"""

import torch
from torch import Tensor

from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics


def residual_order(mean_square: Tensor, count: int) -> Tensor:
    """An order of the channels (int64 [K]) that puts the `count` of the largest E[x^2] (float [K]) last; the others
    keep theirs."""
    last = mean_square.topk(count).indices.sort().values
    first = torch.ones(len(mean_square), dtype=torch.bool, device=mean_square.device)
    first[last] = False
    return torch.cat([first.nonzero().flatten(), last])


def repeat_last(packed: Tensor, block_scales: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Packed values [N, K/2] and block scales [N, K/16], the last `count` channels (a multiple of 16) once more."""
    if not count:
        return packed, block_scales
    scales = block_scales.view(torch.uint8)
    both = torch.cat([scales, scales[:, -(count // 16) :]], 1).view(block_scales.dtype)
    return torch.cat([packed, packed[:, -(count // 2) :]], 1), both


def combined_mean_square(parts: list[InputStatistics]) -> Tensor:
    """Over the rows of all `parts` (float32 [K]); raises CalibrationError where it was not collected."""
    rows = [part.rows or 1 for part in parts]
    total = torch.stack([part["mean_square"] * count for part, count in zip(parts, rows, strict=True)]).sum(0)
    return total / sum(rows)
