"""NVFP4's elements, bit by bit: E2M1 values, E4M3 block scales, and the 128x4 tiled order of block scales.

NVFP4 stores `x = e2m1 * block_scale * tensor_scale`: one E2M1 value (OCP Microscaling Formats 1.0, section 5.3.3) per
element, one E4M3 scale (OCP 8-bit Floating Point 1.0) per 16 consecutive elements of the last axis, one float32
multiplier per tensor (NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference"). The tiled order
is that of cuBLAS' "1D block scaling factors layout", which the block-scaled tensor core instructions read.

Everything runs on the device of its arguments and rounds to nearest even, saturating.
"""

import torch
from torch import Tensor

BLOCK = 16  # elements that share one E4M3 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
TILE_ROWS, TILE_BLOCKS = 128, 4  # one tile of block scales: 512 bytes
SMALLEST_TENSOR_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite
# The scale of a tensor's largest block under max scaling where block scales are searched: they may rise by half.
SEARCHED_LARGEST = 256.0
# What is tried around the code of max scaling (amax / 6), itself first: one code less, and those next to amax / 4.
SEARCHED_OFFSETS = (0, -1, 4, 5)
# A rounding error is an integer number of 2^-9 E2M1 units, at most 1023: 16 squares of it are exact in float32.
ERROR_STEPS, MOST_ERROR_STEPS = 512.0, 1023.0

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


def tensor_scale(amax: Tensor, scale_search: int = 0) -> Tensor:
    """The tensor scale (float32) that maps `amax` to the largest NVFP4 value, 6 * 448, or, where block scales are
    searched, to 6 * 256: they may rise above amax / 6."""
    largest = SEARCHED_LARGEST if scale_search else E4M3_MAX
    return (amax.float() / (E2M1_MAX * largest)).clamp_min(SMALLEST_TENSOR_SCALE)


def e4m3_scale(amax: Tensor) -> Tensor:
    """The scale (float32) that maps `amax` to the largest E4M3 value, 448."""
    return (amax.float() / E4M3_MAX).clamp_min(SMALLEST_TENSOR_SCALE)


def quantize_blocks(x: Tensor, scale: Tensor, scale_search: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize [..., K] under the tensor scale `scale` (float32 scalar): E2M1 codes (uint8 [..., K]) and block scales
    (float8_e4m3fn [..., K/16], row-major).

    `scale_search` says which block scales are tried, and the one of the least squared error is kept, the first among
    equals: 0, only the block's amax / 6; 1, amax / 6 and amax / 4 (Cook et al., "Four Over Six: More Accurate NVFP4
    Quantization with Adaptive Block Scaling", arXiv 2512.02010); 2, the E4M3 codes at SEARCHED_OFFSETS from that of
    amax / 6. Blocks whose amax / 6 is not a code between 0 and the largest (zeros, NaN, beyond the range) keep it.

    Each step is one IEEE float32 operation, in the order of torchao's two-level path. A block whose scale rounds to
    zero has codes 0. Where all values are subnormal the multiplier may be infinite: zeros, then NaN, still become 0.

    Raises ValueError: K is not a multiple of 16.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 blocks are {BLOCK} long: the last axis of shape {tuple(x.shape)} is not a multiple")
    blocks = x.float().reshape(*x.shape[:-1], -1, BLOCK)
    block_scales = e4m3_round(blocks.abs().amax(-1) / E2M1_MAX / scale)
    if scale_search:
        block_scales = _search_scales(blocks, block_scales, scale, scale_search)
    divisors = block_scales.float()
    multipliers = scale.reciprocal() / divisors
    codes = e2m1_encode(blocks * multipliers.unsqueeze(-1)).masked_fill_(divisors.unsqueeze(-1) == 0, 0)
    return codes.flatten(-2), block_scales


def quantize_with_residual(
    x: Tensor, scale: Tensor, scale_search: int, residual_channels: int
) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, and behind the K values, under the same tensor scale, what they lose of the last
    `residual_channels` (a multiple of 16): codes [..., K + R], block scales [..., (K + R)/16].

    A product with weights whose last R columns are there twice adds up both (Meng et al., "ARCQuant: Boosting NVFP4
    Quantization with Augmented Residual Channels for LLMs", arXiv 2601.07475). The difference is one float32 operation.
    """
    codes, block_scales = quantize_blocks(x, scale, scale_search)
    if not residual_channels:
        return codes, block_scales
    last = slice(x.shape[-1] - residual_channels, None)
    seen = dequantize_blocks(codes[..., last], block_scales[..., last.start // BLOCK :], scale)
    more, more_scales = quantize_blocks(x[..., last].float() - seen, scale, scale_search)
    both = torch.cat([block_scales.view(torch.uint8), more_scales.view(torch.uint8)], -1)
    return torch.cat([codes, more], -1), both.view(torch.float8_e4m3fn)


def _search_scales(blocks: Tensor, by_amax: Tensor, scale: Tensor, scale_search: int) -> Tensor:
    """The best scale of each block [..., 16] among the candidates; `by_amax`: the first of them.

    Every step is exact or one IEEE float32 operation, and the sum is of integers: no order of it changes a bit.
    """
    first = by_amax.view(torch.uint8).int()
    if scale_search == 1:
        quarter = e4m3_round(blocks.abs().amax(-1) / 4.0 / scale).view(torch.uint8).int()
        candidates = [first, quarter]
    else:
        candidates = [(first + offset).clamp(1, 126) for offset in SEARCHED_OFFSETS]
    best, least = first, torch.full(first.shape, torch.inf, device=first.device)
    for code in candidates:
        block_scale = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
        multipliers = (scale.reciprocal() / block_scale).clamp_max(torch.finfo(torch.float32).max)
        scaled = blocks.abs() * multipliers.unsqueeze(-1)
        errors = (scaled - _round_to_e2m1(scaled)).abs().clamp_max(MOST_ERROR_STEPS / ERROR_STEPS)
        loss = (errors * ERROR_STEPS).round().square().sum(-1) * block_scale.square()
        better = loss < least
        best, least = torch.where(better, code, best), torch.where(better, loss, least)
    searched = (first > 0) & (first < 126)
    return torch.where(searched, best, first).to(torch.uint8).view(torch.float8_e4m3fn)


def _round_to_e2m1(x: Tensor) -> Tensor:
    """x, not negative, rounded to E2M1: to even multiples of the step between neighbours where two are as near."""
    above_two = torch.where(x < 4, x.round(), (x / 2).round() * 2)
    return torch.where(x < 2, (x * 2).round() / 2, above_two).clamp_max(E2M1_MAX)


def dequantize_blocks(codes: Tensor, block_scales: Tensor, scale: Tensor) -> Tensor:
    """Values (float32 [..., K]) of codes [..., K], row-major block scales [..., K/16] and a tensor scale."""
    blocks = e2m1_decode(codes).view(*codes.shape[:-1], -1, BLOCK)
    return (blocks * block_scales.float().unsqueeze(-1) * scale).flatten(-2)
