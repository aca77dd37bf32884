"""Weights for inputs that are quantized themselves: W4A4 multiplies with q = NVFP4(x), not with x.

The W' that minimises E|W x - W' q|^2 is W E[x q^T] E[q q^T]^-1, linear least squares. What is rounded is W', under the
Hessian of q, which makes good what it can of the activations' errors too. Such a target for GPTQ is that of Li et al.,
"GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv 2504.02692.
"""

import torch
from torch import Tensor

from trt_nvfp4.common.errors import CalibrationError


def least_squares(cross: Tensor, quantized_hessian: Tensor, damping: float) -> Tensor:
    """The matrix [K, K] that W is multiplied with, from E[x q^T] and E[q q^T] (float32 [K, K]); one of an input that is
    always zero, such as that of an expert that no sample reached. `damping` is added to both diagonals, as a share of
    the mean: where samples say little, W' is W. Raises CalibrationError for NaN and Inf."""
    identity = torch.eye(len(cross), device=cross.device)
    if not quantized_hessian.any():
        return identity
    strength = damping * quantized_hessian.diagonal().mean()
    if not (strength > 0 and strength.isfinite() and cross.isfinite().all()):
        raise CalibrationError("quantized-inputs: the input's statistics hold NaN or Inf")
    factor = torch.linalg.cholesky(quantized_hessian + strength * identity)
    return torch.cholesky_solve((cross + strength * identity).T, factor).T
