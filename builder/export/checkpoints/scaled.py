"""Reads 8-bit values that lie as they are, one to a byte, beside their scales: FP8, MXFP8 and INT8."""

import torch
from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts
from trt_nvfp4.builder.export.checkpoints.scales import check_zero_points, spread
from trt_nvfp4.builder.export.checkpoints.weight import QuantizedWeight
from trt_nvfp4.common.json_text import parse_json

_FORMATS = {"F8_E4M3": "FP8", "F8_E5M2": "FP8 (E5M2)", "I8": "INT8"}
_INT8_MAX = 127


def scaled(parts: Parts) -> QuantizedWeight | None:
    """FP8 or INT8 with scales that multiply, per tensor, row, group or block: `weight_scale` (ModelOpt,
    compressed-tensors), `weight_scale_inv` (DeepSeek, which multiplies all the same), `_weight_scale` (torchao); and
    zero points, which are subtracted before."""
    values = "qdata" if "qdata" in parts.keys else "weight"
    scale = "scale_inv" if "scale_inv" in parts.keys else "scale"
    if parts.has({values}) and parts.dtype(values) in _FORMATS:
        raise parts.error(
            f"{parts.keys[values]} is {parts.dtype(values)}, and the files hold no scale for it, such as "
            f"{parts.weight}_scale"
        )
    if not parts.has({values, scale}, {"zero_point"}) or parts.dtype(values) not in _FORMATS:
        return None
    kind = "int" if parts.dtype(values) == "I8" else "float"
    if parts.settings.kinds not in (frozenset(), {kind}, {"int", "float"}):
        raise parts.error(
            f"{parts.keys[values]} is {parts.dtype(values)}, and config.json states values of type "
            f"{', '.join(parts.settings.kinds)}"
        )
    if values == "qdata" and _is_swizzled(parts):
        raise parts.error(
            f"{parts.keys[scale]} is swizzled for one kernel (is_swizzled_scales); this layout is not supported"
        )
    return QuantizedWeight(
        parts, _FORMATS[parts.dtype(values)], parts.shape(values), lambda: _read(parts, values, scale)
    )


def row_scales(weight: QuantizedWeight) -> Tensor | None:
    """The scales, float32 [N], of FP8 weights that have one per tensor or row, and nothing else; None for others."""
    role = next((role for role in ("scale", "scale_inv") if role in weight.parts.keys), None)
    if role is None or weight.format != "FP8" or len(weight.shape) != 2:
        return None
    rows = weight.shape[0]
    if weight.parts.roles - {"weight", "qdata", role} or "pre_quant_scale" in weight.parts.keys:
        return None
    if weight.parts.shape(role) not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return None
    scale = weight.parts.scale(role).reshape(-1).expand(rows).contiguous()
    return scale if (scale > 0).all() else None


def bitsandbytes_int8(parts: Parts) -> QuantizedWeight | None:
    """int8 [N, K] and the largest magnitude of each row, `SCB` [N]."""
    if not parts.has({"weight", "SCB"}, {"weight_format"}) or parts.dtype("weight") != "I8":
        return None
    if "weight_format" in parts.keys and int(parts.read("weight_format").sum()) != 0:
        raise parts.error(f"{parts.weight} lies in an order for one kind of GPU (weight_format), which is not read")

    def dequantize() -> Tensor:
        rows = spread(parts, "SCB", parts.scale("SCB"), parts.shape("weight"))
        return parts.read("weight").float() * (rows / _INT8_MAX)

    return QuantizedWeight(parts, "INT8 (bitsandbytes)", parts.shape("weight"), dequantize)


def _is_swizzled(parts: Parts) -> bool:
    """As torchao describes the weight in the metadata of its file."""
    try:
        described = parse_json(parts.metadata("qdata").get(parts.weight, "{}"))
    except ValueError:
        return False
    data = described.get("_data") if isinstance(described, dict) else None
    return isinstance(data, dict) and bool(data.get("is_swizzled_scales"))


def _read(parts: Parts, values: str, role: str) -> Tensor:
    shape = parts.shape(values)
    whole = parts.read(values).float()
    zero_point = parts.read("zero_point").to(torch.float32) if "zero_point" in parts.keys else None
    if parts.dtype(values) == "I8":
        check_zero_points(parts, zero_point)
    if zero_point is not None:
        whole -= spread(parts, "zero_point", zero_point, shape)
    scale = parts.scale(role)
    if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1:  # ModelOpt's blocks, with the axes in a block kept
        scale = scale[:, 0, :, 0]
    return whole * spread(parts, role, scale, shape)
