"""GPTQ rounding: columns are rounded one after another, and the columns that follow compensate for each one's error.

The update follows the Cholesky factor of the inverse Hessian H = E[x x^T] (Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323, algorithm 1). A block's
scales are chosen when its first column is reached, from its values compensated so far. With `quantized-inputs`, H is
computed from the activations as W4A4 sees them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trt_nvfp4.calibration.recipes.threads import one_thread
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.plugins.ops.number_formats import BLOCK, e2m1_decode, e2m1_encode

# From some columns of a matrix (float32 [N, n blocks of 16]) and the first of their blocks to block scales
# float8_e4m3fn [N, n].
BlockScales = Callable[[Tensor, int], Tensor]
_COLUMNS = 128  # whose updates are applied to the rest at once
_MORE_DAMPING = (1, 3, 10, 30, 100)  # times; the next where the factorization fails


class GPTQ:
    """Rounds the rows of matrices that share one input. Factorizes its Hessian once: 2 K^3 operations."""

    def __init__(self, hessian: Tensor, damping: float) -> None:
        """`hessian`: float32 [K, K], symmetric; `damping`: what is added to its diagonal, as a share of the mean.
        Raises CalibrationError where it is not finite or, even damped, not positive definite."""
        if not hessian.isfinite().all():
            raise CalibrationError("gptq: the Hessian of the input holds NaN or Inf")
        self._factor = _inverse_factor(hessian, damping)

    def round(self, weight: Tensor, tensor_scale: Tensor, choose: BlockScales) -> tuple[Tensor, Tensor]:
        """E2M1 codes (uint8 [N, K]) and block scales (float8_e4m3fn [N, K/16]) of `weight` (float32 [N, K])."""
        factor, k = self._factor, weight.shape[1]
        # Columns as rows: contiguous.
        columns = weight.T.clone(memory_format=torch.contiguous_format)
        scales = torch.ones((k // BLOCK, len(weight)), device=weight.device)
        codes = torch.empty(columns.shape, dtype=torch.uint8, device=weight.device)
        for start in range(0, k, _COLUMNS):
            stop = min(start + _COLUMNS, k)
            errors = torch.empty_like(columns[start:stop])
            with one_thread():
                for i in range(start, stop):
                    scale = scales[i // BLOCK]
                    if i % BLOCK == 0:
                        scale[:] = choose(columns[i : i + BLOCK].T.contiguous(), i // BLOCK)[:, 0]
                    codes[i] = e2m1_encode(
                        (columns[i] * (tensor_scale.reciprocal() / scale)).masked_fill_(scale == 0, 0)
                    )
                    rounded = e2m1_decode(codes[i]).mul_(scale * tensor_scale)
                    errors[i - start] = (columns[i] - rounded) / factor[i, i]
                    columns[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1)
            columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        return codes.T.contiguous(), scales.T.contiguous().to(torch.float8_e4m3fn)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of H + damping; channels that are always zero count as independent."""
    dead = hessian.diagonal() <= 0
    mean = hessian.diagonal().mean()
    if mean == 0:  # an expert that no sample reached
        return torch.eye(len(hessian), device=hessian.device)
    for times in _MORE_DAMPING:
        damped = hessian.clone()
        damped.diagonal()[dead] = mean
        damped.diagonal().add_(times * damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower, out=damped), upper=True)
        if not failed and upper.isfinite().all():
            return upper
    raise CalibrationError("gptq: the Hessian of the input is not positive definite even when damped")
