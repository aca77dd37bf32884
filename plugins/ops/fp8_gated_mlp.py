"""FP8GatedMLP: down(act(gate(x)) * up(x)) with E4M3 weights and activations, gate and up rows interleaved."""

from __future__ import annotations

from torch import Tensor

from . import function_body as text
from .activation import Activation, gate, gate_onnx
from .definition import Formal, OpDefinition, Shape, ShapeRule
from .reference import dequantize_e4m3, linear, through_e4m3


def _reference(
    x: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    down_bias: Tensor,
    input_scale: Tensor,
    hidden_scale: Tensor,
    *,
    activation: int,
    alpha: float,
    limit: float,
) -> Tensor:
    seen = through_e4m3(x.float().reshape(-1, x.shape[-1]), input_scale)
    gate_up = linear(seen, dequantize_e4m3(gate_up_weight, gate_up_scale), gate_up_bias)
    hidden = gate(Activation(activation), gate_up[:, 0::2], gate_up[:, 1::2], alpha, limit)
    y = linear(through_e4m3(hidden, hidden_scale), dequantize_e4m3(down_weight, down_scale), down_bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def _shapes(rule: ShapeRule) -> list[Shape]:
    lead, k = rule.rows("x")
    n = rule.plain_weight("gate_up_weight", k)
    if n % 2:
        raise rule.error(f"gate_up_weight must have an even number of rows (gate and up), found {n}")
    h = rule.plain_weight("down_weight", n // 2)
    for name, channels in (("gate_up", n), ("down", h)):
        rule.expect(f"{name}_scale", (channels,))
        rule.expect(f"{name}_bias", (channels,))
    rule.expect("input_scale", ())
    rule.expect("hidden_scale", ())
    return [(*lead, h)]


_BODY = f"""
        {text.e4m3_constants()}
        {text.attribute_int("activation")}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.rows("x_rows", "x")}
        {text.through_e4m3("seen", "x_rows", "input_scale")}
        {text.dequantize_e4m3("gate_up_w", "gate_up_weight", "gate_up_scale")}
        {text.linear("gate_up_product", "seen", "gate_up_w", "gate_up_bias")}
        {text.split_gate_up("gate", "up", "gate_up_product")}
        {gate_onnx("hidden", "gate", "up")}
        {text.through_e4m3("hidden_seen", "hidden", "hidden_scale")}
        {text.dequantize_e4m3("down_w", "down_weight", "down_scale")}
        {text.linear("down_product", "hidden_seen", "down_w", "down_bias")}
        down_typed = CastLike(down_product, x)
        {text.with_rows_of("y", "down_typed", "x")}
"""

FP8_GATED_MLP = OpDefinition(
    name="FP8GatedMLP",
    doc="""y = down(act(gate(x)) * up(x)) in E4M3: weights with a scale per channel, x and the hidden activations with
one scale each, e4m3(x / scale). Row 2i of gate_up is row i of gate, row 2i+1 row i of up; the biases alike. Sums in
float32, or in the tensor cores' FP8 accumulators, which keep fewer bits.""",
    inputs=(
        Formal("x", "T", "[..., K], K a multiple of 16"),
        Formal("gate_up_weight", "tensor(int8)", "[2I, K] E4M3 bytes"),
        Formal("gate_up_scale", "tensor(float)", "[2I] multipliers"),
        Formal("gate_up_bias", "T", "[2I]"),
        Formal("down_weight", "tensor(int8)", "[H, I] E4M3 bytes, I a multiple of 16"),
        Formal("down_scale", "tensor(float)", "[H] multipliers"),
        Formal("down_bias", "T", "[H]"),
        Formal("input_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
        Formal("hidden_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
    ),
    outputs=(Formal("y", "T", "[..., H]"),),
    attributes={"activation": int(Activation.SILU), "static_scales": 0, "alpha": 1.702, "limit": 7.0},
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
)
