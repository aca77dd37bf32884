"""NVFP4PersistentMLP: a chain of L layers of [RMSNorm] -> MLP -> [residual add], gated or plain."""

from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.activation import Activation, activate, activate_onnx, gate, gate_onnx
from trt_nvfp4.plugins.ops.definition import (
    QUANTIZATION_FLAGS,
    QUANTIZATION_RANGES,
    Formal,
    OpDefinition,
    Shape,
    ShapeRule,
)
from trt_nvfp4.plugins.ops.reference import dequantize_weight, gemm_input, linear, rms_norm
from trt_nvfp4.plugins.ops.weight_format import NVFP4

_PER_LAYER = (
    "norm_weight",
    "up_weight",
    "up_scales",
    "up_tensor_scale",
    "up_bias",
    "down_weight",
    "down_scales",
    "down_tensor_scale",
    "down_bias",
    "input_tensor_scale",
    "hidden_tensor_scale",
)

_BYTES = ("up_weight", "up_scales", "down_weight", "down_scales")


def _reference(
    x: Tensor,
    norm_weight: Tensor,
    up_weight: Tensor,
    up_scales: Tensor,
    up_tensor_scale: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_scales: Tensor,
    down_tensor_scale: Tensor,
    down_bias: Tensor,
    input_tensor_scale: Tensor,
    hidden_tensor_scale: Tensor,
    *,
    activation: int,
    gated: int,
    norm: int,
    residual: int,
    epsilon: float,
    quantize_activations: int,
    scale_search: int,
    residual_channels: int,
    alpha: float,
    limit: float,
) -> Tensor:
    act = Activation(activation)
    state = x.float().reshape(-1, x.shape[-1])
    how = quantize_activations, scale_search, residual_channels
    for i in range(norm_weight.shape[0]):
        seen = rms_norm(state, norm_weight[i], epsilon, x.dtype) if norm else state
        seen = gemm_input(seen, x.dtype, input_tensor_scale[i], *how)
        up = linear(seen, dequantize_weight(up_weight[i], up_scales[i], up_tensor_scale[i]), up_bias[i])
        hidden = gate(act, up[:, 0::2], up[:, 1::2], alpha, limit) if gated else activate(act, up)
        hidden = gemm_input(hidden, x.dtype, hidden_tensor_scale[i], *how)
        down = linear(hidden, dequantize_weight(down_weight[i], down_scales[i], down_tensor_scale[i]), down_bias[i])
        state = (down + state if residual else down).to(x.dtype).float()
    return state.to(x.dtype).reshape(*x.shape[:-1], -1)


def _shapes(rule: ShapeRule) -> list[Shape]:
    attributes = rule.attributes
    if not attributes["gated"]:
        rule.expect_ungated_activation()
    lead, k = rule.rows("x")
    layers = rule.shapes["norm_weight"][0] if rule.shapes["norm_weight"] else 0
    if not isinstance(layers, int) or layers < 1:
        raise rule.error(f"norm_weight must have shape [L, {k}] with L >= 1 layers, found L = {layers}")
    rule.expect("norm_weight", (layers, k))
    n = NVFP4.check(rule, "up", k, (layers,))
    rule.expect("up_bias", (layers, n))
    if attributes["gated"] and n % 2:
        raise rule.error(f"up_weight must have an even number of rows (gate and up), found {n}")
    intermediate = n // 2 if attributes["gated"] else n
    rule.residual_channels(k, intermediate)
    h = NVFP4.check(rule, "down", intermediate, (layers,))
    rule.expect("down_bias", (layers, h))
    NVFP4.check_scales(rule, (layers,))
    if h != k and (layers > 1 or attributes["residual"]):
        raise rule.error(f"several layers or a residual need H == K, found H = {h}, K = {k}")
    return [(*lead, h)]


_LAYER = f"""
            {
    "".join(
        f'''
            {name}_i = Gather({name + "_numbers" if name in _BYTES else name}, layer)'''
        for name in _PER_LAYER
    )
}
            normed = If(norm) <
                then_branch = with_norm () => (unit) {{ {text.rms_norm("unit", "state", "norm_weight_i")} }},
                else_branch = without_norm () => (raw) {{ raw = Identity(state) }}
            >
            {text.gemm_input("seen", "normed", "input_tensor_scale_i")}
            {text.decode_weight("up_w", "up_weight_i", "up_scales_i", "up_tensor_scale_i")}
            {text.linear("up_product", "seen", "up_w", "up_bias_i")}
            hidden = If(gated) <
                then_branch = with_gate () => (gated_hidden) {{
                    {text.split_gate_up("gate_half", "up_half", "up_product")}
                    {gate_onnx("gated_hidden", "gate_half", "up_half")} }},
                else_branch = without_gate () => (plain_hidden) {{ {activate_onnx("plain_hidden", "up_product")} }}
            >
            {text.gemm_input("hidden_seen", "hidden", "hidden_tensor_scale_i")}
            {text.decode_weight("down_w", "down_weight_i", "down_scales_i", "down_tensor_scale_i")}
            {text.linear("down_product", "hidden_seen", "down_w", "down_bias_i")}
            layer_output = If(residual) <
                then_branch = with_residual () => (sum) {{ sum = Add(down_product, state) }},
                else_branch = without_residual () => (product) {{ product = Identity(down_product) }}
            >
            layer_output_typed = CastLike(layer_output, x)
            next_state = Cast<to = {text.FLOAT}>(layer_output_typed)
            go_on = Identity(condition)
"""

_BODY = f"""
        {text.constants()}
        {text.attribute_int("activation")}
        {text.attribute_flag("gated")}
        {text.attribute_flag("norm")}
        {text.attribute_flag("residual")}
        {text.attribute_float("epsilon")}
        {text.attribute_flag("quantize_activations")}
        {text.quantization_attributes()}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.rows("x_rows", "x")}
        {
    "".join(
        f'''
        {name}_numbers = DequantizeLinear({name}, one_f)'''
        for name in _BYTES
    )
}
        layers_shape = Shape<start = 0, end = 1>(norm_weight)
        no_axes = Constant<value = int64[1] {{0}}>()
        layers = Squeeze(layers_shape, no_axes)
        always = Constant<value = bool {{1}}>()
        last_state = Loop(layers, always, x_rows) <
            body = one_layer (int64 layer, bool condition, float[rows, k] state)
                => (bool go_on, float[rows, h] next_state) {{ {_LAYER} }}
        >
        last_state_typed = CastLike(last_state, x)
        {text.with_rows_of("y", "last_state_typed")}
"""

NVFP4_PERSISTENT_MLP = OpDefinition(
    name="NVFP4PersistentMLP",
    doc="""For each of L layers: n = RMSNorm(x) * norm_weight (norm 1) or x, in x's type; h = act(gate(n)) * up(n)
(gated 1; rows of up_weight alternate gate, up) or act(up(n)); x = down(h) + x (residual 1) or down(h), in x's type.
Within a layer float32, except that n and h are rounded to x's type, or with quantize_activations to NVFP4, behind which
stands what that loses of their last residual_channels.""",
    inputs=(
        Formal("x", "T", "[..., K], K a multiple of 16"),
        Formal("norm_weight", "T", "[L, K]; its values are not read unless norm is 1"),
        Formal(
            "up_weight",
            "tensor(int8)",
            "[L, N1, (K + R)/2] E2M1, two per byte; N1 = 2I if gated, else I; R is residual_channels",
        ),
        Formal(
            "up_scales",
            "tensor(int8)",
            "[L, ceil(N1/128)*128, ceil((K + R)/64)*4] E4M3 bytes, each layer 128x4 tiled",
        ),
        Formal("up_tensor_scale", "tensor(float)", "[L] multipliers"),
        Formal("up_bias", "T", "[L, N1]"),
        Formal("down_weight", "tensor(int8)", "[L, H, (I + R)/2], I a multiple of 16"),
        Formal(
            "down_scales",
            "tensor(int8)",
            "[L, ceil(H/128)*128, ceil((I + R)/64)*4] E4M3 bytes, each layer 128x4 tiled",
        ),
        Formal("down_tensor_scale", "tensor(float)", "[L] multipliers"),
        Formal("down_bias", "T", "[L, H]; H = K if L > 1 or residual is 1"),
        Formal("input_tensor_scale", "tensor(float)", "[L]; 0: computed at run time"),
        Formal("hidden_tensor_scale", "tensor(float)", "[L]; 0: computed at run time"),
    ),
    outputs=(Formal("y", "T", "[..., H]"),),
    attributes={
        "activation": int(Activation.SILU),
        "gated": 1,
        "norm": 1,
        "residual": 1,
        "epsilon": 1e-6,
        "quantize_activations": 0,
        **QUANTIZATION_FLAGS,
        "static_scales": 0,
        "alpha": 1.702,
        "limit": 7.0,
    },
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
    ranges=QUANTIZATION_RANGES,
)
