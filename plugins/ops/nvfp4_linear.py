"""NVFP4Linear: act(x W^T + b) with NVFP4 weights."""

from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.activation import Activation, activate, activate_onnx
from trt_nvfp4.plugins.ops.definition import (
    QUANTIZATION_FLAGS,
    QUANTIZATION_RANGES,
    Formal,
    OpDefinition,
    Shape,
    ShapeRule,
)
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tiled_shape
from trt_nvfp4.plugins.ops.reference import dequantize_weight, gemm_input, linear


def _reference(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    weight_tensor_scale: Tensor,
    bias: Tensor,
    input_tensor_scale: Tensor,
    *,
    activation: int,
    quantize_activations: int,
    scale_search: int,
    residual_channels: int,
) -> Tensor:
    matrix = x.float().reshape(-1, x.shape[-1])
    matrix = gemm_input(matrix, x.dtype, input_tensor_scale, quantize_activations, scale_search, residual_channels)
    y = linear(matrix, dequantize_weight(weight, weight_scales, weight_tensor_scale), bias)
    return activate(Activation(activation), y).to(x.dtype).reshape(*x.shape[:-1], -1)


def _shapes(rule: ShapeRule) -> list[Shape]:
    rule.expect_ungated_activation()
    lead, k = rule.rows("x")
    stored = k + rule.residual_channels(k)
    n = rule.weight("weight", stored, values_per_byte=2)
    rule.expect("weight_scales", tiled_shape(n, stored // BLOCK))
    rule.expect("bias", (n,))
    rule.expect("weight_tensor_scale", ())
    rule.expect("input_tensor_scale", ())
    return [(*lead, n)]


_BODY = f"""
        {text.constants()}
        {text.attribute_int("activation")}
        {text.attribute_flag("quantize_activations")}
        {text.quantization_attributes()}
        {text.rows("x_rows", "x")}
        {text.gemm_input("seen", "x_rows", "input_tensor_scale")}
        {text.dequantize_weight("w", "weight", "weight_scales", "weight_tensor_scale")}
        {text.linear("product", "seen", "w", "bias")}
        {activate_onnx("activated", "product")}
        activated_typed = CastLike(activated, x)
        {text.with_rows_of("y", "activated_typed")}
"""

NVFP4_LINEAR = OpDefinition(
    name="NVFP4Linear",
    doc="""y = act(x W^T + bias), computed in float32 and rounded once. W is NVFP4; with quantize_activations so is x,
and behind it what that loses of its last residual_channels.""",
    inputs=(
        Formal("x", "T", "[..., K], K a multiple of 16"),
        Formal(
            "weight",
            "tensor(int8)",
            "[N, (K + R)/2] E2M1, even element in the low nibble; R is residual_channels",
        ),
        Formal("weight_scales", "tensor(int8)", "[ceil(N/128)*128, ceil((K + R)/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("weight_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("bias", "T", "[N]"),
        Formal("input_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    outputs=(Formal("y", "T", "[..., N]"),),
    attributes={
        "activation": int(Activation.IDENTITY),
        "quantize_activations": 0,
        **QUANTIZATION_FLAGS,
        "static_scales": 0,
    },
    ranges=QUANTIZATION_RANGES,
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
)
