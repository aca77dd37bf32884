"""NVFP4Quantize: activations to NVFP4, optionally after a residual add and an RMSNorm."""

import math

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.definition import (
    QUANTIZATION_FLAGS,
    QUANTIZATION_RANGES,
    Formal,
    OpDefinition,
    Shape,
    ShapeRule,
)
from trt_nvfp4.plugins.ops.number_formats import BLOCK, pack, quantize_with_residual, tile_scales, tiled_shape
from trt_nvfp4.plugins.ops.reference import chosen_scale, rms_norm


def _reference(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    scale: Tensor,
    *,
    norm: int,
    add_residual: int,
    epsilon: float,
    scale_search: int,
    residual_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = (x.float() + residual.float()).to(x.dtype) if add_residual else x
    matrix = summed.float().reshape(-1, x.shape[-1])
    if norm:
        matrix = rms_norm(matrix, norm_weight, epsilon, x.dtype)
    scale = chosen_scale(scale, matrix, scale_search)
    codes, block_scales = quantize_with_residual(matrix, scale, scale_search, residual_channels)
    packed = pack(codes).view(torch.int8).reshape(*x.shape[:-1], -1)
    return packed, tile_scales(block_scales).view(torch.int8), scale, summed


def _shapes(rule: ShapeRule) -> list[Shape]:
    lead, k = rule.rows("x")
    rule.expect("residual", (*lead, k))
    rule.expect("norm_weight", (k,))
    rule.expect("tensor_scale", ())
    rows = math.prod(d for d in lead if isinstance(d, int))
    known = all(isinstance(d, int) for d in lead)
    stored = k + rule.residual_channels(k)
    padded_rows, padded_blocks = tiled_shape(rows, stored // BLOCK)
    return [(*lead, stored // 2), (padded_rows if known else None, padded_blocks), (), (*lead, k)]


_BODY = f"""
        {text.constants()}
        {text.attribute_flag("norm")}
        {text.attribute_flag("add_residual")}
        {text.attribute_float("epsilon")}
        {text.quantization_attributes()}
        residual_out = If(add_residual) <
            then_branch = added () => (sum) {{
                sum_x = Cast<to = {text.FLOAT}>(x)
                sum_residual = Cast<to = {text.FLOAT}>(residual)
                sum_float = Add(sum_x, sum_residual)
                sum = CastLike(sum_float, x) }},
            else_branch = not_added () => (same) {{ same = Identity(x) }}
        >
        {text.rows("r", "residual_out")}
        n = If(norm) <
            then_branch = normed () => (unit) {{ {text.rms_norm("unit", "r", "norm_weight")} }},
            else_branch = not_normed () => (raw) {{ raw = Identity(r) }}
        >
        {text.quantize_blocks("q", "n", "tensor_scale")}
        tensor_scale_out = Identity(q_tensor_scale)
        {text.pack("q_bytes", "q")}
        stored_bytes, stored_scales = If(residual_is_on) <
            then_branch = with_residual () => (both_bytes, both_scales) {{
                {text.lost("lost", "n", "q")}
                {text.quantize_blocks("e", "lost", "q_tensor_scale", branches=False)}
                {text.pack("e_bytes", "e")}
                both_bytes = Concat<axis = 1>(q_bytes, e_bytes)
                both_scales = Concat<axis = 1>(q_scale_bytes, e_scale_bytes) }},
            else_branch = without_residual () => (q_bytes_alone, q_scales_alone) {{
                q_bytes_alone = Identity(q_bytes)
                q_scales_alone = Identity(q_scale_bytes) }}
        >
        {text.with_rows_of("packed", "stored_bytes")}
        {text.tile_scales("tiled", "stored_scales")}
        tile_rows = Constant<value = int64[1] {{128}}>()
        no_row = Constant<value = int64[1] {{0}}>()
        row_bound = Mul(packed_count, tile_rows)
        block_scales = Slice(tiled, no_row, row_bound, no_row)
"""

NVFP4_QUANTIZE = OpDefinition(
    name="NVFP4Quantize",
    doc="""r = x + residual (add_residual 1) or x, in x's type; n = RMSNorm(r) * norm_weight (norm 1) or r, in x's type;
n quantized to NVFP4 under `tensor_scale`, or where that is 0 under amax / 2688 (scale_search 0) or amax / 1536; behind
it, under the same scale, what that loses of the last R = residual_channels.""",
    inputs=(
        Formal("x", "T", "[..., K], K a multiple of 16"),
        Formal("residual", "T", "[..., K]; not read unless add_residual is 1"),
        Formal("norm_weight", "T", "[K]; not read unless norm is 1"),
        Formal("tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    outputs=(
        Formal("packed", "tensor(int8)", "[..., (K + R)/2] E2M1, two per byte, even element in the low nibble"),
        Formal(
            "block_scales",
            "tensor(int8)",
            "[ceil(M/128)*128, ceil((K + R)/64)*4] E4M3 bytes, 128x4 tiled, zero padded; M = all leading dimensions",
        ),
        Formal("tensor_scale_out", "tensor(float)", "[] the scale used"),
        Formal("residual_out", "T", "[..., K] r"),
    ),
    attributes={"norm": 0, "add_residual": 0, "epsilon": 1e-6, **QUANTIZATION_FLAGS},
    ranges=QUANTIZATION_RANGES,
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
)
