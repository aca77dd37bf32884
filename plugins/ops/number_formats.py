"""NVFP4's elements, bit by bit: E2M1 values, E4M3 block scales, and the 128x4 tiled order of block scales.

NVFP4 stores `x = e2m1 * block_scale * tensor_scale`: one E2M1 value (OCP Microscaling Formats 1.0, section 5.3.3) per
element, one E4M3 scale (OCP 8-bit Floating Point 1.0) per 16 consecutive elements of the last axis, one float32
multiplier per tensor (NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference"). The tiled order
is that of cuBLAS' "1D block scaling factors layout", which the block-scaled tensor core instructions read.

Everything runs on the device of its arguments and rounds to nearest even, saturating.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # elements that share one E4M3 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
TILE_ROWS, TILE_BLOCKS = 128, 4  # one tile of block scales: 512 bytes
SMALLEST_TENSOR_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E4M3_VALUES = tuple(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())  # of codes 0..126

# Half way between neighbouring magnitudes, and which code wins the tie: the even one.
_E2M1_MIDPOINTS = ((0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6))


def e2m1_encode(x: Tensor) -> Tensor:
    """Round float values of any shape to E2M1 codes (uint8, 0..15). Beyond 6 saturates; the sign of zero is kept; NaN
    becomes 0."""
    magnitude = x.float().abs()
    codes = x.signbit().logical_and_(~x.isnan()).to(torch.uint8).mul_(8)
    for below, (midpoint, even) in enumerate(_E2M1_MIDPOINTS):
        codes += magnitude > midpoint if even == below else magnitude >= midpoint
    return codes


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values (float32) of E2M1 codes 0..15 of any shape."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def pack(codes: Tensor) -> Tensor:
    """Two codes to a byte along the last axis, the even element in the low nibble: uint8 [..., K] -> [..., K/2].

    Raises ValueError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"pack: the last axis must be even, found shape {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 or int8 [..., K/2] -> uint8 codes [..., K]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e4m3_round(x: Tensor) -> Tensor:
    """Round to float8_e4m3fn, saturating at +-448; subnormals (down to 2^-9) and NaN are kept."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """The shape of [rows, blocks] scales once padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS


def tile_scales(scales: Tensor) -> Tensor:
    """Row-major block scales [..., N, Kb] to the 128x4 tiled order, zero padded: [..., ceil(N/128)*128, ceil(Kb/4)*4].

    Block b of row n lies at byte ((n/128) * (Kbp/4) + b/4) * 512 + (n%32) * 16 + (n%128)/32 * 4 + b%4.
    """
    *batch, rows, blocks = scales.shape
    padded_rows, padded_blocks = tiled_shape(rows, blocks)
    padded = torch.zeros((*batch, padded_rows, padded_blocks), dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :blocks] = scales.view(torch.uint8)
    tiles = padded.view(*batch, padded_rows // 128, 4, 32, padded_blocks // 4, 4).transpose(-4, -2)
    return tiles.reshape(padded.shape).view(scales.dtype)


def untile_scales(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `tile_scales`: tiled [..., Np, Kbp] -> row-major [..., rows, blocks].

    Raises ValueError: [Np, Kbp] is not what so many rows and blocks are padded to.
    """
    *batch, padded_rows, padded_blocks = tiled.shape
    if (padded_rows, padded_blocks) != tiled_shape(rows, blocks):
        raise ValueError(
            f"untile_scales: {rows} x {blocks} block scales are tiled as {tiled_shape(rows, blocks)}, "
            f"found {(padded_rows, padded_blocks)}"
        )
    tiles = tiled.view(torch.uint8).view(*batch, padded_rows // 128, padded_blocks // 4, 32, 4, 4).transpose(-4, -2)
    return tiles.reshape(tiled.shape)[..., :rows, :blocks].contiguous().view(tiled.dtype)


def tensor_scale(amax: Tensor) -> Tensor:
    """The tensor scale (float32) that maps `amax` to the largest NVFP4 value, 6 * 448."""
    return (amax.float() / (E2M1_MAX * E4M3_MAX)).clamp_min(SMALLEST_TENSOR_SCALE)


def e4m3_scale(amax: Tensor) -> Tensor:
    """The scale (float32) that maps `amax` to the largest E4M3 value, 448."""
    return (amax.float() / E4M3_MAX).clamp_min(SMALLEST_TENSOR_SCALE)


def quantize_blocks(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., K] under the tensor scale `scale` (float32 scalar): E2M1 codes (uint8 [..., K]) and block scales
    (float8_e4m3fn [..., K/16], row-major).

    Each step is one IEEE float32 operation, in the order of torchao's two-level path. A block whose scale rounds to
    zero has codes 0. Where all values are subnormal the multiplier may be infinite: zeros, then NaN, still become 0.

    Raises ValueError: K is no multiple of 16.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 blocks are {BLOCK} long: the last axis of shape {tuple(x.shape)} is not a multiple")
    blocks = x.float().reshape(*x.shape[:-1], -1, BLOCK)
    block_scales = e4m3_round(blocks.abs().amax(-1) / E2M1_MAX / scale)
    divisors = block_scales.float()
    multipliers = scale.reciprocal() / divisors
    codes = e2m1_encode(blocks * multipliers.unsqueeze(-1)).masked_fill_(divisors.unsqueeze(-1) == 0, 0)
    return codes.flatten(-2), block_scales


def dequantize_blocks(codes: Tensor, block_scales: Tensor, scale: Tensor) -> Tensor:
    """Values (float32 [..., K]) of codes [..., K], row-major block scales [..., K/16] and a tensor scale."""
    blocks = e2m1_decode(codes).view(*codes.shape[:-1], -1, BLOCK)
    return (blocks * block_scales.float().unsqueeze(-1) * scale).flatten(-2)
