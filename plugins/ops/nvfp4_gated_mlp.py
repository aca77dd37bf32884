"""NVFP4GatedMLP: down(act(gate(x)) * up(x)) with NVFP4 weights, gate and up rows interleaved."""

from __future__ import annotations

from torch import Tensor

from . import function_body as text
from .activation import Activation, gate, gate_onnx
from .definition import Formal, OpDefinition, Shape, ShapeRule
from .reference import dequantize_weight, gemm_input, linear


def _reference(
    x: Tensor,
    gate_up_weight: Tensor,
    gate_up_scales: Tensor,
    gate_up_tensor_scale: Tensor,
    gate_up_bias: Tensor,
    down_weight: Tensor,
    down_scales: Tensor,
    down_tensor_scale: Tensor,
    down_bias: Tensor,
    input_tensor_scale: Tensor,
    hidden_tensor_scale: Tensor,
    *,
    activation: int,
    quantize_activations: int,
    alpha: float,
    limit: float,
) -> Tensor:
    matrix = x.float().reshape(-1, x.shape[-1])
    matrix = gemm_input(matrix, x.dtype, quantize_activations, input_tensor_scale)
    gate_up = linear(matrix, dequantize_weight(gate_up_weight, gate_up_scales, gate_up_tensor_scale), gate_up_bias)
    hidden = gate(Activation(activation), gate_up[:, 0::2], gate_up[:, 1::2], alpha, limit)
    hidden = gemm_input(hidden, x.dtype, quantize_activations, hidden_tensor_scale)
    y = linear(hidden, dequantize_weight(down_weight, down_scales, down_tensor_scale), down_bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def _shapes(rule: ShapeRule) -> list[Shape]:
    lead, k = rule.rows("x")
    n = rule.weight("gate_up_weight", "gate_up_scales", k)
    rule.expect("gate_up_bias", (n,))
    if n % 2:
        raise rule.error(f"gate_up_weight must have an even number of rows (gate and up), found {n}")
    h = rule.weight("down_weight", "down_scales", n // 2)
    rule.expect("down_bias", (h,))
    for scale in ("gate_up_tensor_scale", "down_tensor_scale", "input_tensor_scale", "hidden_tensor_scale"):
        rule.expect(scale, ())
    return [(*lead, h)]


_BODY = f"""
        {text.constants()}
        {text.attribute_int("activation")}
        {text.attribute_flag("quantize_activations")}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.rows("x_rows", "x")}
        {text.gemm_input("seen", "x_rows", "input_tensor_scale", "x")}
        {text.dequantize_weight("gate_up_w", "gate_up_weight", "gate_up_scales", "gate_up_tensor_scale")}
        {text.linear("gate_up_product", "seen", "gate_up_w", "gate_up_bias")}
        {text.split_gate_up("gate", "up", "gate_up_product")}
        {gate_onnx("hidden", "gate", "up")}
        {text.gemm_input("hidden_seen", "hidden", "hidden_tensor_scale", "x")}
        {text.dequantize_weight("down_w", "down_weight", "down_scales", "down_tensor_scale")}
        {text.linear("down_product", "hidden_seen", "down_w", "down_bias")}
        down_typed = CastLike(down_product, x)
        {text.with_rows_of("y", "down_typed", "x")}
"""

NVFP4_GATED_MLP = OpDefinition(
    name="NVFP4GatedMLP",
    doc="""y = down(act(gate(x)) * up(x)). Row 2i of gate_up is row i of gate, row 2i+1 row i of up; the biases alike.
Computed in float32; the hidden activations are rounded to x's type, or with quantize_activations to NVFP4, as x is.""",
    inputs=(
        Formal("x", "T", "[..., K], K a multiple of 16"),
        Formal("gate_up_weight", "tensor(int8)", "[2I, K/2] E2M1, two per byte, even element in the low nibble"),
        Formal("gate_up_scales", "tensor(int8)", "[ceil(2I/128)*128, ceil(K/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("gate_up_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("gate_up_bias", "T", "[2I]"),
        Formal("down_weight", "tensor(int8)", "[H, I/2], I a multiple of 16"),
        Formal("down_scales", "tensor(int8)", "[ceil(H/128)*128, ceil(I/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("down_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("down_bias", "T", "[H]"),
        Formal("input_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
        Formal("hidden_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    outputs=(Formal("y", "T", "[..., H]"),),
    attributes={
        "activation": int(Activation.SILU),
        "quantize_activations": 0,
        "static_scales": 0,
        "alpha": 1.702,
        "limit": 7.0,
    },
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
)
