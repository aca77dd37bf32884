"""A mixture of experts behind its router's logits, whatever the format of the experts' weights: top-k choice, experts,
weighted sum, shared expert."""

from functools import partial

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.activation import Activation, activate, activate_onnx, gate, gate_onnx
from trt_nvfp4.plugins.ops.definition import STATIC_SCALES, Formal, OpDefinition, Shape, ShapeRule
from trt_nvfp4.plugins.ops.moe_routing import (
    MAX_EXPERTS,
    ROUTING,
    ROUTING_ATTRIBUTES,
    ROUTING_RANGES,
    check_groups,
    route,
)
from trt_nvfp4.plugins.ops.weight_format import WeightFormat


def moe_op(name: str, doc: str, weights: tuple[Formal, ...], fmt: WeightFormat) -> OpDefinition:
    """The op: `weights` are its inputs from the routed experts' to the shared one's."""
    return OpDefinition(
        name=name,
        doc=doc,
        inputs=(
            Formal("x", "T", "[..., H], H a multiple of 16"),
            Formal("router_logits", "tensor(float)", "[..., E]"),
            Formal("correction_bias", "tensor(float)", "[E] added to the scores for the choice only"),
            *weights,
            Formal("shared_gate", "T", "[H]; its values are not read unless shared_gated is 1"),
            *fmt.scales,
        ),
        outputs=(Formal("y", "T", "[..., H]"),),
        attributes={
            **ROUTING_ATTRIBUTES,
            "scale_input": 0,
            "activation": int(Activation.SILU),
            "gated": 1,
            "alpha": 1.702,
            "limit": 7.0,
            "shared": 0,
            "shared_gated": 0,
            **fmt.flags,
            STATIC_SCALES: 0,
        },
        body=_body(fmt),
        torch_reference=partial(_reference, fmt),
        shape_rule=partial(_shapes, fmt),
        ranges={**ROUTING_RANGES, **fmt.ranges},
    )


def _reference(
    fmt: WeightFormat,
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor,
    *tensors: Tensor,
    scale_input: int,
    activation: int,
    gated: int,
    alpha: float,
    limit: float,
    shared: int,
    shared_gated: int,
    **others: int | float,
) -> Tensor:
    act = Activation(activation)
    matrix = x.float().reshape(-1, x.shape[-1])
    flags = {name: others.pop(name) for name in fmt.flags}
    gate_up, down, shared_gate_up, shared_down = (tensors[i * fmt.width : (i + 1) * fmt.width] for i in range(4))
    shared_gate, input_scale, hidden_scale = tensors[4 * fmt.width :]

    def seen(rows: Tensor, given_scale: Tensor) -> Tensor:
        return fmt.seen(rows, x.dtype, given_scale, **flags)

    def hidden_of(product: Tensor) -> Tensor:
        return gate(act, product[:, 0::2], product[:, 1::2], alpha, limit) if gated else activate(act, product)

    experts, weights = route(router_logits.reshape(-1, router_logits.shape[-1]), correction_bias, **others)  # type: ignore[arg-type]
    rows = matrix.unsqueeze(1) * (weights if scale_input else torch.ones_like(weights)).unsqueeze(-1)
    rows = seen(rows.to(x.dtype).float(), input_scale)
    hidden = rows.new_empty(*experts.shape, gate_up[0].shape[-2] // (2 if gated else 1))
    outputs = rows.new_empty(*experts.shape, down[0].shape[-2])
    chosen = sorted(set(experts.flatten().tolist()))
    for e in chosen:
        hidden[experts == e] = hidden_of(fmt.product(rows[experts == e], *(t[e] for t in gate_up)))
    hidden = seen(hidden, hidden_scale)
    for e in chosen:
        outputs[experts == e] = fmt.product(hidden[experts == e], *(t[e] for t in down))

    y = torch.zeros_like(outputs[:, 0])
    for rank in range(experts.shape[1]):
        y = y + (outputs[:, rank] if scale_input else weights[:, rank, None] * outputs[:, rank])
    if shared:
        shared_hidden = hidden_of(fmt.product(seen(matrix, input_scale), *shared_gate_up))
        output = fmt.product(seen(shared_hidden, hidden_scale), *shared_down)
        y = y + (output * (matrix @ shared_gate.float()).sigmoid().unsqueeze(-1) if shared_gated else output)
    return y.to(x.dtype).reshape(x.shape)


def _shapes(fmt: WeightFormat, rule: ShapeRule) -> list[Shape]:
    gated = rule.attributes["gated"]
    if not gated:
        rule.expect_ungated_activation()
    lead, h = rule.rows("x")
    logits = rule.shapes["router_logits"]
    experts = logits[-1] if logits else None
    if not isinstance(experts, int) or not 1 <= experts <= MAX_EXPERTS:
        raise rule.error(f"the last dimension of router_logits must be 1 to {MAX_EXPERTS} experts, found {experts}")
    rule.expect("router_logits", (*lead, experts))
    rule.expect("correction_bias", (experts,))
    check_groups(rule, experts)

    batches: dict[str, Shape] = {"": (experts,), "shared_": ()}
    for prefix, batch in batches.items():
        if (n := fmt.check_mlp(rule, prefix, h, gated, batch)) != h:
            raise rule.error(f"{prefix}down_weight must have as many rows as x has columns, {h}, found {n}")
    rule.expect("shared_gate", (h,))
    fmt.check_scales(rule)
    return [(*lead, h)]


def _hidden(y: str, product: str) -> str:
    return f"""{y} = If(gated) <
            then_branch = {y}_gated () => ({y}_with_gate) {{
                {text.split_gate_up(f"{y}_gate_half", f"{y}_up_half", product)}
                {gate_onnx(f"{y}_with_gate", f"{y}_gate_half", f"{y}_up_half")} }},
            else_branch = {y}_plain () => ({y}_without_gate) {{ {activate_onnx(f"{y}_without_gate", product)} }}
        >"""


def _each_expert(y: str, fmt: WeightFormat, first: str, rows: str, projection: str, activated: bool) -> str:
    """y [M, top_k, N]: the projection of rows [M, top_k, K] by the expert of each; `first` is y's zeros. An expert
    that nobody chose is not decoded."""
    result = _hidden(f"{y}_result", f"{y}_product") if activated else f"{y}_result = Identity({y}_product)"
    gathered = "\n".join(f"{y}_{part} = Gather({projection}_{part}, {y}_e)" for part in (*fmt.names, "bias"))
    return f"""{y} = Loop(expert_count, always, {first}) <
            body = {y}_expert (int64 {y}_e, bool {y}_condition, float[tokens, ranks, {y}_n] {y}_before)
                => (bool {y}_go_on, float[tokens, ranks, {y}_n] {y}_after) {{
                {y}_go_on = Identity({y}_condition)
                {y}_chosen = Equal(experts, {y}_e)
                {y}_chosen_rows = Unsqueeze({y}_chosen, axis_last)
                {y}_ones = Cast<to = {text.FLOAT}>({y}_chosen)
                {y}_count = ReduceSum<keepdims = 0>({y}_ones)
                {y}_anyone = Greater({y}_count, zero_f)
                {y}_after = If({y}_anyone) <
                    then_branch = {y}_compute () => ({y}_new) {{
                        {y}_masked = Where({y}_chosen_rows, {rows}, zero_f)
                        {y}_rows = ReduceSum<keepdims = 0>({y}_masked, axis_ranks)
                        {gathered}
                        {fmt.decoded_onnx(f"{y}_w", y)}
                        {text.linear(f"{y}_product", f"{y}_rows", f"{y}_w", f"{y}_bias")}
                        {result}
                        {y}_result_rows = Unsqueeze({y}_result, axis_ranks)
                        {y}_new = Where({y}_chosen_rows, {y}_result_rows, {y}_before) }},
                    else_branch = {y}_skip () => ({y}_same) {{ {y}_same = Identity({y}_before) }}
                >
            }}
        >"""


def _with_shared(y: str, routed: str, fmt: WeightFormat) -> str:
    """y [M, H]: the routed experts' sum and the shared expert's output. An If on each side of the hidden activations:
    in a single one, whose branches hold further Ifs, ONNX Runtime loses the order of the nodes when it inlines them."""
    input_scale, hidden_scale = (scale.name for scale in fmt.scales)
    return f"""shared_product = If(shared) <
            then_branch = with_shared_product () => (shared_up_product) {{
                {fmt.seen_onnx("shared_seen", "x_rows", input_scale)}
                {fmt.decoded_onnx("shared_up_w", "shared_gate_up")}
                {text.linear("shared_up_product", "shared_seen", "shared_up_w", "shared_gate_up_bias")} }},
            else_branch = without_shared_product () => (no_product) {{ no_product = Identity({routed}) }}
        >
        {_hidden("shared_hidden", "shared_product")}
        {y} = If(shared) <
            then_branch = with_shared () => ({y}_with_shared) {{
                {fmt.seen_onnx("shared_hidden_seen", "shared_hidden", hidden_scale)}
                {fmt.decoded_onnx("shared_down_w", "shared_down")}
                {text.linear("shared_output", "shared_hidden_seen", "shared_down_w", "shared_down_bias")}
                shared_gate_float = Cast<to = {text.FLOAT}>(shared_gate)
                shared_gate_column = Unsqueeze(shared_gate_float, axis_last)
                shared_gate_logit = MatMul(x_rows, shared_gate_column)
                shared_gate_sigmoid = Sigmoid(shared_gate_logit)
                shared_factor = Where(shared_gated, shared_gate_sigmoid, one_f)
                shared_scaled = Mul(shared_output, shared_factor)
                {y}_with_shared = Add({routed}, shared_scaled) }},
            else_branch = without_shared () => ({y}_routed) {{ {y}_routed = Identity({routed}) }}
        >"""


def _body(fmt: WeightFormat) -> str:
    input_scale, hidden_scale = (scale.name for scale in fmt.scales)
    return f"""
        {fmt.constants}
        {ROUTING}
        {text.attribute_flag("scale_input")}
        {text.attribute_int("activation")}
        {text.attribute_flag("gated")}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.attribute_flag("shared")}
        {text.attribute_flag("shared_gated")}
        {fmt.attributes_onnx}
        always = Constant<value = bool {{1}}>()
        expert_axis = Shape<start = 0, end = 1>(correction_bias)
        expert_count = Squeeze(expert_axis, first_axis)
        {text.rows("x_rows", "x")}
        input_factors = Where(scale_input, weights, one_f)
        output_factors = Where(scale_input, one_f, weights)
        input_factor_columns = Unsqueeze(input_factors, axis_last)
        x_once = Unsqueeze(x_rows, axis_ranks)
        x_scaled = Mul(x_once, input_factor_columns)
        x_scaled_typed = CastLike(x_scaled, x)
        x_by_rank = Cast<to = {text.FLOAT}>(x_scaled_typed)
        x_by_rank_shape = Shape(x_by_rank)
        hidden_size = Shape<start = -1>(x_rows)
        x_matrix_shape = Concat<axis = 0>(axis_last, hidden_size)
        x_matrix = Reshape(x_by_rank, x_matrix_shape)
        {fmt.seen_onnx("seen_matrix", "x_matrix", input_scale)}
        weights_shape = Shape(weights)
        seen_width = Shape<start = -1>(seen_matrix)
        seen_shape = Concat<axis = 0>(weights_shape, seen_width)
        seen = Reshape(seen_matrix, seen_shape)
        up_rows = Shape<start = -1>(gate_up_bias)
        once = Constant<value_int: int = 1>()
        rows_of_a_channel = Add(gated_int, once)
        intermediate = Div(up_rows, rows_of_a_channel)
        hidden_shape = Concat<axis = 0>(weights_shape, intermediate)
        no_hidden = ConstantOfShape(hidden_shape)
        {_each_expert("expert_hidden", fmt, "no_hidden", "seen", "gate_up", True)}
        hidden_matrix_shape = Concat<axis = 0>(axis_last, intermediate)
        hidden_matrix = Reshape(expert_hidden, hidden_matrix_shape)
        {fmt.seen_onnx("hidden_seen_matrix", "hidden_matrix", hidden_scale)}
        hidden_seen_width = Shape<start = -1>(hidden_seen_matrix)
        hidden_seen_shape = Concat<axis = 0>(weights_shape, hidden_seen_width)
        hidden_seen = Reshape(hidden_seen_matrix, hidden_seen_shape)
        no_output = ConstantOfShape(x_by_rank_shape)
        {_each_expert("expert_output", fmt, "no_output", "hidden_seen", "down", False)}
        output_factor_columns = Unsqueeze(output_factors, axis_last)
        weighted = Mul(expert_output, output_factor_columns)
        routed = ReduceSum<keepdims = 0>(weighted, axis_ranks)
        {_with_shared("sum", "routed", fmt)}
        sum_typed = CastLike(sum, x)
        {text.with_rows_of("y", "sum_typed")}
"""
