"""NVFP4 tensors: quantize, dequantize. The format is described in `trt_nvfp4.plugins.ops.number_formats`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops import number_formats
from trt_nvfp4.plugins.ops.number_formats import BLOCK

_CHUNK = 1 << 19  # elements in work at a time: float32 intermediates stay within a CPU's cache


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


def quantize(x: Tensor, tensor_scale: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to NVFP4 with max scaling.

    Args:
        x: [..., K] of any float type, on any device; K is a multiple of 16. Values are read as float32.
        tensor_scale: the multiplier per tensor, positive and finite; None: amax / 2688 (at least 2^-126).

    Returns:
        packed: uint8 [..., K/2], the even element in the low nibble.
        block_scales: float8_e4m3fn [..., K/16], row-major, in 0 .. 448. Subnormal ones (below 2^-6) are kept.
        tensor_scale: float32 scalar.

    Raises:
        ValueError: K is not a multiple of 16 (pad with zeros before); x holds NaN or Inf (the message says where);
            the tensor scale is not positive and finite.
    """
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"nvfp4.quantize: the last axis must be a multiple of {BLOCK}, found shape {tuple(x.shape)}; "
            "pad it with zeros"
        )
    if not x.is_floating_point():
        raise ValueError(f"nvfp4.quantize: expected a float tensor, found {x.dtype}")
    amax = finite_amax(x, "nvfp4.quantize")
    scale = number_formats.tensor_scale(amax) if tensor_scale is None else _checked_scale(tensor_scale, x.device)
    packed = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    block_scales = torch.empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.float8_e4m3fn, device=x.device)
    flat = x.reshape(-1)
    for part in _chunks(x.numel()):
        codes, scales = number_formats.quantize_blocks(flat[part], scale)
        packed.view(-1)[part.start // 2 : part.stop // 2] = number_formats.pack(codes)
        block_scales.view(-1)[part.start // BLOCK : part.stop // BLOCK] = scales
    return packed, block_scales, scale


def is_zero(packed: Tensor, block_scales: Tensor) -> bool:
    """Whether all values of an NVFP4 tensor are 0 by their codes or their block scales, whatever its tensor scale is.

    Args:
        packed: uint8 [..., K/2]. block_scales: float8_e4m3fn [..., K/16]; NaN counts where the codes are not 0.
    """
    return packed.dtype == torch.uint8 and not ((packed & 0x77).any() and (block_scales.float() != 0).any())


def dequantize(
    packed: Tensor, block_scales: Tensor, tensor_scale: Tensor | float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of an NVFP4 tensor: e2m1 * block_scale * tensor_scale in float32, rounded to dtype.

    Args:
        packed: uint8 or int8 [..., K/2], the even element in the low nibble.
        block_scales: float8_e4m3fn [..., K/16], row-major.
        tensor_scale: the multiplier per tensor.
        dtype: of the result.

    Returns:
        [..., K] of `dtype`.

    Raises:
        ValueError: shapes or types do not belong together.
    """
    if packed.dtype not in (torch.uint8, torch.int8) or block_scales.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "nvfp4.dequantize: expected uint8 values and float8_e4m3fn block scales, "
            f"found {packed.dtype} and {block_scales.dtype}"
        )
    if packed.dim() == 0 or (*packed.shape[:-1], packed.shape[-1] * 2) != (
        *block_scales.shape[:-1],
        block_scales.shape[-1] * BLOCK,
    ):
        raise ValueError(
            "nvfp4.dequantize: expected values [..., K/2] and block scales [..., K/16], "
            f"found {tuple(packed.shape)} and {tuple(block_scales.shape)}"
        )
    scale = torch.as_tensor(tensor_scale, dtype=torch.float32, device=packed.device).reshape(())
    values = torch.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype, device=packed.device)
    flat_packed, flat_scales = packed.contiguous().view(-1), block_scales.contiguous().view(-1)
    for part in _chunks(values.numel()):
        codes = number_formats.unpack(flat_packed[part.start // 2 : part.stop // 2])
        scales = flat_scales[part.start // BLOCK : part.stop // BLOCK]
        values.view(-1)[part] = number_formats.dequantize_blocks(codes, scales, scale).to(dtype)
    return values


def _chunks(count: int) -> Iterator[slice]:
    """Consecutive slices, each of whole blocks."""
    for start in range(0, count, _CHUNK):
        yield slice(start, min(start + _CHUNK, count))


def _checked_scale(tensor_scale: Tensor | float, device: torch.device) -> Tensor:
    scale = torch.as_tensor(tensor_scale, dtype=torch.float32, device=device)
    if scale.numel() != 1 or not (scale > 0).all() or not scale.isfinite().all():
        raise ValueError(f"nvfp4.quantize: tensor_scale must be one positive, finite number, found {tensor_scale}")
    return scale.reshape(())
