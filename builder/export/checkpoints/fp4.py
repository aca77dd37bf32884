"""Reads 4-bit floating point: NVFP4 and MXFP4."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts
from trt_nvfp4.builder.export.checkpoints.weight import QuantizedWeight
from trt_nvfp4.common.nvfp4 import is_zero
from trt_nvfp4.plugins.ops.number_formats import BLOCK, e2m1_decode, unpack

MX_BLOCK = 32


def nvfp4(parts: Parts) -> QuantizedWeight | None:
    """uint8 [..., K/2], E4M3 scales [..., K/16] (K/32 by ModelOpt's W4A8), and a scale per tensor: ModelOpt's
    multiplies, compressed-tensors' divides. Stacked experts may lie transposed, [E, K/2, N]."""
    modelopt = parts.has({"weight", "scale", "scale_2"})
    if not (modelopt or parts.has({"packed", "scale", "global_scale"})):
        return None
    values, by_tensor = ("weight", "scale_2") if modelopt else ("packed", "global_scale")
    if parts.dtype(values) != "U8" or parts.dtype("scale") != "F8_E4M3":
        return None
    stated = parts.settings.groups & {BLOCK, MX_BLOCK} or {BLOCK}
    found = _columns_by_scale(parts, values)
    block = int(found) if found in stated else min(stated)
    shape, axis = _unpacked(parts, values, block)

    def dequantize() -> Tensor:
        packed, block_scales = parts.read(values), parts.unchecked_scale("scale")
        scale, dead = _tensor_scale(parts, by_tensor, packed, block_scales, divides=not modelopt)
        block_scales = block_scales.masked_fill(dead, 0).transpose(axis, -1)
        if not block_scales.isfinite().all():
            raise parts.error(f"{parts.keys['scale']} holds scales that are NaN")
        whole = _decoded(packed.transpose(axis, -1))
        # Exact: two bits of a value and four of a scale.
        blocks = whole.view(*block_scales.shape, block) * block_scales.bfloat16().unsqueeze(-1)
        return (blocks.flatten(-2).float() * scale).transpose(axis, -1)

    return QuantizedWeight(parts, "NVFP4" if block == BLOCK else f"FP4 in blocks of {block}", shape, dequantize)


def _tensor_scale(
    parts: Parts, role: str, packed: Tensor, block_scales: Tensor, divides: bool
) -> tuple[Tensor, Tensor]:
    """The multiplier of a matrix [], or of each of a stack [E, 1, 1]; and which matrices are all zeros: some tools
    write scales of 0, infinity or NaN for experts that are never chosen."""
    stored = parts.unchecked_scale(role)
    count = packed.shape[0] if packed.dim() == 3 and stored.numel() > 1 else 1
    if stored.numel() != count:
        raise parts.error(f"{parts.keys[role]} must hold {count} scales, found {list(stored.shape)}")
    scale = (stored.reciprocal() if divides else stored).reshape(-1)
    usable, dead = (scale > 0) & scale.isfinite(), torch.zeros(count, dtype=torch.bool)
    if not (usable.all() and block_scales.isfinite().all()):
        stacks = packed.reshape(count, -1), block_scales.reshape(count, -1)
        dead = torch.tensor([is_zero(codes, scales) for codes, scales in zip(*stacks, strict=True)])
    if bad := stored.reshape(-1)[~(usable | dead)].tolist():
        raise parts.error(
            f"{parts.keys[role]} must hold positive, finite scales{' that divide' if divides else ''}, found {bad[0]:g}"
        )
    shape = [-1, 1, 1] if count > 1 else []
    return scale.where(usable, 1.0).reshape(shape), dead.reshape(shape)


def mxfp4(parts: Parts) -> QuantizedWeight | None:
    """uint8 [N, K/2] and E8M0 scales [N, K/32], by ModelOpt or compressed-tensors."""
    values = "weight" if parts.has({"weight", "scale"}) else "packed" if parts.has({"packed", "scale"}) else None
    if values is None or parts.dtype(values) != "U8" or parts.dtype("scale") not in ("U8", "F8_E8M0"):
        return None
    if _columns_by_scale(parts, values) == MX_BLOCK * 3 // 2:  # MXFP6
        return None
    shape, axis = _unpacked(parts, values, MX_BLOCK)

    def dequantize() -> Tensor:
        scales = parts.scale("scale").transpose(axis, -1)
        blocks = parts.read(values).transpose(axis, -1).reshape(*scales.shape, MX_BLOCK // 2)
        return _mx(blocks, scales).transpose(axis, -1)

    return QuantizedWeight(parts, "MXFP4", shape, dequantize)


def gpt_oss_mxfp4(parts: Parts) -> QuantizedWeight | None:
    """uint8 blocks [E, N, K/32, 16] and E8M0 scales [E, N, K/32] of stacked experts, which the model holds as
    [E, K, N]."""
    if not parts.has({"blocks", "scales"}):
        return None
    found, scales = parts.shape("blocks"), parts.shape("scales")
    if len(found) != 4 or found[:-1] != scales or found[-1] != MX_BLOCK // 2 or parts.dtype("blocks") != "U8":
        raise parts.error(
            f"{parts.keys['blocks']} must hold uint8 [experts, rows, blocks, 16] with a scale for each block, found "
            f"{parts.dtype('blocks')} {list(found)} and {list(scales)} scales"
        )
    shape = (found[0], found[2] * MX_BLOCK, found[1])

    def dequantize() -> Tensor:
        blocks, of_blocks = parts.read("blocks"), parts.scale("scales")
        whole = torch.empty(shape, dtype=torch.bfloat16)
        for expert in range(shape[0]):
            whole[expert] = _mx(blocks[expert], of_blocks[expert]).T
        return whole

    return QuantizedWeight(parts, "MXFP4", shape, dequantize)


def _columns_by_scale(parts: Parts, values: str) -> float:
    """How many columns share a scale, at two to a byte, where each row has scales of its own; 0 for other shapes."""
    packed, scales = parts.shape(values), parts.shape("scale")
    by_row = len(packed) == len(scales) >= 2 and packed[:-1] == scales[:-1] and scales[-1] > 0
    return packed[-1] * 2 / scales[-1] if by_row else 0


def _unpacked(parts: Parts, values: str, block: int) -> tuple[tuple[int, ...], int]:
    """The shape of the weight, and the axis along which values are packed and share scales."""
    packed, scales = parts.shape(values), parts.shape("scale")
    for axis in (-1, -2) if len(packed) == 3 else (-1,):
        whole = len(packed) in (2, 3) and packed[axis] * 2 % block == 0
        if whole and scales == _with(packed, axis, packed[axis] * 2 // block):
            return _with(packed, axis, packed[axis] * 2), axis
    raise parts.error(
        f"{parts.weight} must hold values [N, K/2] and block scales [N, K/{block}], found {list(packed)} and "
        f"{list(scales)}"
    )


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[axis] = size
    return tuple(changed)


def _decoded(packed: Tensor) -> Tensor:
    """Values in bfloat16, which has them all, of codes that are packed along the last axis."""
    every = torch.arange(256, dtype=torch.uint8)
    pairs = e2m1_decode(unpack(every[:, None])).bfloat16().view(torch.int32).flatten()  # two values, as one number
    return pairs.index_select(0, packed.flatten().int()).view(torch.bfloat16).view(*packed.shape[:-1], -1)


def _mx(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values [..., G * 32] of blocks [..., G, 16] and their scales [..., G]; exact in bfloat16."""
    return (e2m1_decode(unpack(blocks)) * scales.unsqueeze(-1)).flatten(-2).bfloat16()
