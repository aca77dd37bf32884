"""down(act(gate(x)) * up(x)), gate and up rows interleaved, whatever the format of the weights."""

from functools import partial

from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.activation import Activation, gate, gate_onnx
from trt_nvfp4.plugins.ops.definition import STATIC_SCALES, Formal, OpDefinition, Shape, ShapeRule
from trt_nvfp4.plugins.ops.weight_format import WeightFormat


def gated_mlp_op(name: str, doc: str, weights: tuple[Formal, ...], fmt: WeightFormat) -> OpDefinition:
    """The op: `weights` are the inputs of gate and up together, then those of down."""
    return OpDefinition(
        name=name,
        doc=doc,
        inputs=(Formal("x", "T", "[..., K], K a multiple of 16"), *weights, *fmt.scales),
        outputs=(Formal("y", "T", "[..., H]"),),
        attributes={
            "activation": int(Activation.SILU),
            **fmt.flags,
            STATIC_SCALES: 0,
            "alpha": 1.702,
            "limit": 7.0,
        },
        body=_body(fmt),
        torch_reference=partial(_reference, fmt),
        shape_rule=partial(_shapes, fmt),
        ranges=fmt.ranges,
    )


def _reference(
    fmt: WeightFormat, x: Tensor, *tensors: Tensor, activation: int, alpha: float, limit: float, **flags: int
) -> Tensor:
    gate_up, down = tensors[: fmt.width], tensors[fmt.width : 2 * fmt.width]
    input_scale, hidden_scale = tensors[2 * fmt.width :]
    rows = fmt.seen(x.float().reshape(-1, x.shape[-1]), x.dtype, input_scale, **flags)
    both = fmt.product(rows, *gate_up)
    hidden = gate(Activation(activation), both[:, 0::2], both[:, 1::2], alpha, limit)
    y = fmt.product(fmt.seen(hidden, x.dtype, hidden_scale, **flags), *down)
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def _shapes(fmt: WeightFormat, rule: ShapeRule) -> list[Shape]:
    lead, k = rule.rows("x")
    h = fmt.check_mlp(rule, "", k, gated=True)
    fmt.check_scales(rule)
    return [(*lead, h)]


def _body(fmt: WeightFormat) -> str:
    input_scale, hidden_scale = (scale.name for scale in fmt.scales)
    return f"""
        {fmt.constants}
        {text.attribute_int("activation")}
        {fmt.attributes_onnx}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.rows("x_rows", "x")}
        {fmt.seen_onnx("seen", "x_rows", input_scale)}
        {fmt.decoded_onnx("gate_up_w", "gate_up")}
        {text.linear("gate_up_product", "seen", "gate_up_w", "gate_up_bias")}
        {text.split_gate_up("gate", "up", "gate_up_product")}
        {gate_onnx("hidden", "gate", "up")}
        {fmt.seen_onnx("hidden_seen", "hidden", hidden_scale)}
        {fmt.decoded_onnx("down_w", "down")}
        {text.linear("down_product", "hidden_seen", "down_w", "down_bias")}
        down_typed = CastLike(down_product, x)
        {text.with_rows_of("y", "down_typed")}
"""
