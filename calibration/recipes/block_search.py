"""The best E4M3 scale of each NVFP4 block among a few candidates, by a distance between weights before and after.

Exact and memory-bounded: weights are read in tiles, candidates are tried one after another.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops.number_formats import BLOCK, E2M1_MAX, E4M3_MAX, E4M3_VALUES, e4m3_round

# Elements of a tile. On a CPU: so many that operations take longer than what Python does between them, for which
# threads wait for one another. A GPU wants many at once.
_CPU_TILE, _GPU_TILE = 1 << 20, 1 << 24
_TILE_COLUMNS = 512  # or more where there are few rows
# (x + c) - c rounds to a multiple of 0.5 * 2^e, ties to even, for c = 1.5 * 2^22 * 2^e: float32 has 23 fraction bits.
_ROUNDING = 1.5 * 2.0**22
_EXPONENT_BITS = 0x7F800000

# From the errors [blocks, 16, rows] of a tile and the first of its blocks along K to squared distances [blocks, rows].
Distance = Callable[[Tensor, int], Tensor]
# Codes (int32 [blocks, rows]) to try, of the largest magnitudes [blocks, rows] and the tensor scale; the first is kept
# where no other is better.
Candidates = Callable[[Tensor, Tensor], Iterator[Tensor]]


def squared(errors: Tensor, _: int) -> Tensor:
    """The plain squared distance."""
    return errors.square_().sum(1)


def scale_codes(magnitudes: Tensor, target: float, tensor_scale: Tensor) -> Tensor:
    """E4M3 codes (int32) of the block scales that map `magnitudes` to `target`."""
    return e4m3_round(magnitudes / target / tensor_scale).view(torch.uint8).int()


def search(weight: Tensor, tensor_scale: Tensor, candidates: Candidates, distance: Distance = squared) -> Tensor:
    """Block scales (float8_e4m3fn [N, K/16]) for `weight` (float32 [N, K]) that minimise `distance` block by block."""
    rows, k = weight.shape
    tile_size = _GPU_TILE if weight.is_cuda else _CPU_TILE
    columns = min(k, max(_TILE_COLUMNS, tile_size // rows // BLOCK * BLOCK))
    step = max(1, tile_size // columns)
    codes = torch.empty((rows, k // BLOCK), dtype=torch.uint8, device=weight.device)
    for row in range(0, rows, step):
        for column in range(0, k, columns):
            tile = weight[row : row + step, column : column + columns]
            blocks = tile.reshape(len(tile), -1, BLOCK).permute(1, 2, 0).contiguous()
            first = column // BLOCK
            best = _best_codes(blocks, first, tensor_scale, candidates, distance)
            codes[row : row + step, first : first + len(blocks)] = best.T
    return codes.view(torch.float8_e4m3fn)


def _best_codes(blocks: Tensor, first: int, tensor_scale: Tensor, candidates: Candidates, distance: Distance) -> Tensor:
    """uint8 [blocks, rows] for blocks [blocks, 16, rows], the first of them `first` along K."""
    magnitudes = torch.maximum(blocks.amax(1), -blocks.amin(1)).abs_()  # -0 would be no code of a scale
    values = torch.tensor((*E4M3_VALUES, E4M3_MAX), device=blocks.device)
    scaled, ulps = torch.empty_like(blocks), torch.empty_like(blocks)
    best = least = None
    for codes in candidates(magnitudes, tensor_scale):
        scales = values[codes]
        torch.mul(blocks, (tensor_scale.reciprocal() / scales).unsqueeze(1), out=scaled)
        error = distance(_rounding_errors(scaled, ulps), first).mul_(scales.square_())
        if best is None or least is None:
            best, least = codes, error.nan_to_num_(nan=torch.inf)
        else:
            better = error < least  # NaN, where a scale is zero, is not
            best, least = torch.where(better, codes, best), torch.where(better, error, least)
    assert best is not None
    return best.masked_fill_(magnitudes == 0, 0).to(torch.uint8)


def _rounding_errors(scaled: Tensor, ulps: Tensor) -> Tensor:
    """E2M1(x) - x, in `ulps`' memory: E2M1 has one fraction bit, 0.5 as the least step, 6 as the largest value."""
    torch.abs(scaled, out=ulps)
    ulps.clamp_(1.0, 4.0).view(torch.int32).bitwise_and_(_EXPONENT_BITS)
    ulps.mul_(_ROUNDING)
    rounded = torch.add(scaled, ulps).sub_(ulps).clamp_(-E2M1_MAX, E2M1_MAX)
    return torch.sub(rounded, scaled, out=ulps)
