"""Rounding and block scales learned by gradient: sign descent on an offset of every weight and on a factor of every
block scale, against the output error E|(W' - W) x|^2, from what GPTQ found.

The kind of AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of
LLMs", arXiv 2309.05516), one matrix at a time. The gradient of the error is 2 (W' - W) H, H = E[x x^T], and passes the
roundings unchanged; the learning rate falls from 1 / steps of a rounding interval to 0, so that a weight moves by half
of one at most. A row keeps the best that it has seen: no row ends with a larger error than it started with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops.number_formats import BLOCK, e2m1_decode, e2m1_encode, e4m3_round

STEPS = 200


def learn(
    rows: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, hessian: Tensor, steps: int = STEPS
) -> tuple[Tensor, Tensor]:
    """Better E2M1 codes (uint8 [N, K]) and block scales (float8_e4m3fn [N, K/16]) of `rows` (float32 [N, K]) than those
    given, by `hessian` (float32 [K, K])."""
    first = scales.float()
    values = e2m1_decode(codes)
    factor = torch.ones_like(first)
    best_codes, best_scales = codes.clone(), first.clone()
    least = torch.full((len(rows),), torch.inf, device=rows.device)
    unscaled = rows / _wide(first * tensor_scale).clamp_min(torch.finfo(torch.float32).tiny)
    offset = torch.where(_wide(first) > 0, values - unscaled, 0.0)
    for step in range(steps):
        tried = e4m3_round(first * factor).float()
        scale = _wide(tried * tensor_scale)
        wanted = torch.where(scale > 0, rows / scale.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        rounded = e2m1_encode(wanted + offset)
        values = e2m1_decode(rounded)
        error = values * scale - rows
        gradient = error @ hessian
        loss = (gradient * error).sum(1)
        better = loss < least
        least = torch.where(better, loss, least)
        best_codes[better], best_scales[better] = rounded[better], tried[better]
        rate = (1 - step / steps) / steps
        # E2M1's intervals are 0.5 below 2, 1 below 4, else 2 wide.
        interval = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
        offset -= rate * interval * gradient.sign()
        slope = (gradient * (values - wanted)).view(len(rows), -1, BLOCK).sum(-1)
        factor -= rate * slope.sign()
    return best_codes, e4m3_round(best_scales)


def _wide(scales: Tensor) -> Tensor:
    """Of blocks, of channels."""
    return scales.repeat_interleave(BLOCK, 1)
