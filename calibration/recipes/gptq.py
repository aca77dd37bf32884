"""GPTQ rounding: columns are rounded one after another, and each one's error is made good by those that follow.

The update follows the Cholesky factor of the inverse Hessian H = E[x x^T] (Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323, algorithm 1). Block
scales are fixed before, from the weights as they were, so that any order of columns can be taken: `activation-order`
takes those with the largest E[x^2] first. With `quantized-inputs`, H is that of the activations as W4A4 sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trt_nvfp4.calibration.errors import CalibrationError
from trt_nvfp4.plugins.ops.number_formats import BLOCK, e2m1_decode, e2m1_encode

_COLUMNS = 128  # whose updates are applied to the rest at once
_DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean diagonal; the next where the factorization fails


class GPTQ:
    """Rounds the rows of matrices that share one input. Factorizes its Hessian once: 2 K^3 operations."""

    def __init__(self, hessian: Tensor, activation_order: bool = False) -> None:
        """`hessian`: float32 [K, K], symmetric. Raises CalibrationError where it is not finite or, even damped,
        not positive definite."""
        diagonal = hessian.diagonal()
        if not hessian.isfinite().all():
            raise CalibrationError("gptq: the Hessian of the input holds NaN or Inf")
        self._order = torch.argsort(diagonal, descending=True, stable=True) if activation_order else None
        self._factor = _inverse_factor(hessian if self._order is None else hessian[self._order][:, self._order])

    def round(self, weight: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> Tensor:
        """E2M1 codes (uint8 [N, K]) for `weight` (float32 [N, K]) under fixed scales."""
        order, factor = self._order, self._factor
        k = weight.shape[1]
        scales = block_scales.float().T
        multipliers = (tensor_scale.reciprocal() / scales).masked_fill_(scales == 0, 0)
        scales = scales * tensor_scale
        # Columns as rows: contiguous.
        columns = (weight.T if order is None else weight.T[order]).contiguous()
        if order is None and columns.data_ptr() == weight.data_ptr():
            columns = columns.clone()
        block = torch.arange(k, device=weight.device) // BLOCK
        block = block if order is None else block[order]
        codes = torch.empty(columns.shape, dtype=torch.uint8, device=weight.device)
        for start in range(0, k, _COLUMNS):
            stop = min(start + _COLUMNS, k)
            errors = torch.empty_like(columns[start:stop])
            for i in range(start, stop):
                b = block[i]
                codes[i] = e2m1_encode(columns[i] * multipliers[b])
                rounded = e2m1_decode(codes[i]).mul_(scales[b])
                errors[i - start] = (columns[i] - rounded) / factor[i, i]
                columns[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1)
            columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        if order is not None:
            codes[order] = codes.clone()
        by_row: Tensor = codes.T.contiguous()
        return by_row


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of H + damping; channels that are always zero count as independent."""
    dead = hessian.diagonal() <= 0
    mean = hessian.diagonal().mean()
    if mean == 0:  # an expert that no sample reached
        return torch.eye(len(hessian), device=hessian.device)
    for damping in _DAMPING:
        damped = hessian.clone()
        damped.diagonal()[dead] = mean
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower, out=damped), upper=True)
        if not failed and upper.isfinite().all():
            return upper
    raise CalibrationError("gptq: the Hessian of the input is not positive definite even when damped")
