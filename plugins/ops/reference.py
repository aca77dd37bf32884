"""Functions that the Torch references of the ops share: plain float32 Torch, written apart from the ONNX bodies."""

import torch
from torch import Tensor
from torch.nn import functional

from trt_nvfp4.plugins.ops.number_formats import (
    BLOCK,
    dequantize_blocks,
    e4m3_round,
    e4m3_scale,
    quantize_with_residual,
    tensor_scale,
    unpack,
    untile_scales,
)


def chosen_scale(given: Tensor, x: Tensor, scale_search: int = 0) -> Tensor:
    """The given tensor scale, or where that is 0 the one of x's largest magnitude."""
    return given if given != 0 else tensor_scale(x.abs().max(), scale_search)


def dequantize_weight(packed: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of packed int8 [N, K/2] and tiled block scales (int8, E4M3 bytes)."""
    codes = unpack(packed)
    block_scales = untile_scales(scales.view(torch.float8_e4m3fn), codes.shape[0], codes.shape[1] // BLOCK)
    return dequantize_blocks(codes, block_scales, scale)


def gemm_input(
    x: Tensor,
    dtype: torch.dtype,
    given_scale: Tensor,
    quantize_activations: int,
    scale_search: int,
    residual_channels: int,
) -> Tensor:
    """float32 x as the GEMM sees it: rounded to dtype, or quantized to NVFP4 and back, behind it residual channels."""
    if not quantize_activations:
        return x.to(dtype).float()
    scale = chosen_scale(given_scale, x, scale_search)
    return dequantize_blocks(*quantize_with_residual(x, scale, scale_search, residual_channels), scale)


def through_e4m3(x: Tensor, given_scale: Tensor) -> Tensor:
    """float32 x quantized to E4M3 and back, under the given scale or, where that is 0, amax / 448."""
    scale = given_scale if given_scale != 0 else e4m3_scale(x.abs().max())
    return e4m3_round(x / scale).float() * scale


def dequantize_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of E4M3 bytes (int8 [N, K]) and a multiplier per row."""
    return values.view(torch.float8_e4m3fn).float() * scale[:, None]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias.float())


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """float32 RMSNorm over the last axis, rounded to dtype, returned in float32."""
    return functional.rms_norm(x, x.shape[-1:], weight.float(), epsilon).to(dtype).float()
