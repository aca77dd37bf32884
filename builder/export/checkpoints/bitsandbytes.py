"""Reads the 4-bit weights of bitsandbytes: NF4 and FP4, their scales quantized once more or not."""

import math
from typing import Any

import torch
from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts
from trt_nvfp4.builder.export.checkpoints.weight import QuantizedWeight
from trt_nvfp4.common.json_text import parse_json

_STATE = "quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")


def bitsandbytes_4bit(parts: Parts) -> QuantizedWeight | None:
    """uint8 [N * K / 2, 1], the first value of a byte in the high nibble, `absmax` per block of a row-major weight and
    `quant_map`, the values of the 16 codes; JSON of what else there is to know in a tensor of bytes."""
    stated = next((role for role in parts.roles if role.startswith(_STATE)), None)
    if stated is None or not parts.has({"weight", "absmax", "quant_map", stated}, _NESTED):
        return None
    state = _state(parts, stated)
    shape, block = tuple(state["shape"]), state["blocksize"]
    count = math.prod(shape)
    blocks = -(-count // block)
    bytes_found = math.prod(parts.shape("weight"))
    if bytes_found != -(-count // 2) or parts.shape("absmax") != (blocks,) or parts.shape("quant_map") != (16,):
        raise parts.error(f"{parts.weight} must hold {list(shape)} in 4 bits and {blocks} scales")

    def dequantize() -> Tensor:
        pairs = parts.read("weight").reshape(-1).view(torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[:count]
        values = parts.read("quant_map").float().index_select(0, codes.int())
        of_values = _absmax(parts, state).repeat_interleave(block)[:count]
        return (values * of_values).reshape(shape)

    return QuantizedWeight(parts, f"{state['quant_type'].upper()} (bitsandbytes)", shape, dequantize)


def _absmax(parts: Parts, state: dict[str, Any]) -> Tensor:
    if not set(_NESTED) <= parts.keys.keys():
        return parts.scale("absmax")
    codes, of_codes, scales = parts.read("absmax"), parts.read("nested_quant_map").float(), parts.scale("nested_absmax")
    block = state["nested_blocksize"]
    if codes.dtype != torch.uint8 or of_codes.shape != (256,) or scales.shape != (-(-codes.numel() // block),):
        raise parts.error(f"{parts.keys['absmax']} must hold codes of scales, with a scale for every {block} of them")
    spread = scales.repeat_interleave(block)[: len(codes)]
    return of_codes.index_select(0, codes.int()) * spread + float(state["nested_offset"])


def _state(parts: Parts, role: str) -> dict[str, Any]:
    try:
        state = parse_json(bytes(parts.read(role).view(torch.uint8).tolist()).decode())
    except ValueError as error:
        raise parts.error(f"{parts.keys[role]} is not JSON") from error
    sizes = ("blocksize", "nested_blocksize") if set(_NESTED) <= parts.keys.keys() else ("blocksize",)
    if (
        not isinstance(state, dict)
        or state.get("quant_type") not in ("nf4", "fp4")
        or not isinstance(shape := state.get("shape"), list)
        or len(shape) != 2
        or not all(_is_size(size) for size in (*shape, *map(state.get, sizes)))
        or not isinstance(state.get("nested_offset", 0.0), float | int)
    ):
        raise parts.error(f"{parts.keys[role]} does not describe the 4-bit weight {parts.weight}")
    return {"nested_offset": 0.0, **state}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
