"""NVFP4MoE: a mixture of experts behind its router's logits: top-k choice, NVFP4 experts, weighted sum, shared
expert."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from . import function_body as text
from .activation import Activation, activate, activate_onnx, gate, gate_onnx
from .definition import Formal, OpDefinition, Shape, ShapeRule
from .number_formats import BLOCK, tiled_shape
from .reference import dequantize_weight, gemm_input, linear

MAX_EXPERTS = 1024
MAX_TOP_K = 64
_SMALLEST_SUM = 1e-20  # DeepSeek-V3's: renormalised zeros stay zeros


class Scoring(IntEnum):
    """The `scoring` attribute: what an expert's score is, before the choice (0, 1) or after it (2, 3)."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # gpt-oss
    SIGMOID_OF_CHOSEN = 3  # Llama 4


def no_shared_expert(hidden: int, gated: int) -> dict[str, Shape]:
    """Shapes of the inputs of the smallest shared expert, by name: what a model without one gives as zeros."""
    rows = 2 * BLOCK if gated else BLOCK
    return {
        "shared_gate_up_weight": (rows, hidden // 2),
        "shared_gate_up_scales": tiled_shape(rows, hidden // BLOCK),
        "shared_gate_up_tensor_scale": (),
        "shared_gate_up_bias": (rows,),
        "shared_down_weight": (hidden, BLOCK // 2),
        "shared_down_scales": tiled_shape(hidden, 1),
        "shared_down_tensor_scale": (),
        "shared_down_bias": (hidden,),
        "shared_gate": (hidden,),
    }


def route(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    scoring: int,
    renormalize: int,
    scaling_factor: float,
    n_group: int,
    topk_group: int,
    group_score_top: int,
) -> tuple[Tensor, Tensor]:
    """The experts chosen for each row of router_logits [M, E] float32, in order of rank (int64 [M, top_k]), and their
    weights (float32 [M, top_k])."""
    logits = _finite(router_logits)
    scores = {Scoring.SOFTMAX: logits.softmax(-1), Scoring.SIGMOID: logits.sigmoid()}.get(Scoring(scoring), logits)
    groups = _finite(scores + correction_bias).reshape(logits.shape[0], n_group, -1)
    group_scores = groups.sort(-1, descending=True).values[..., :group_score_top].sum(-1)
    excluded = group_scores.argsort(dim=-1, descending=True, stable=True)[:, topk_group:]
    open_groups = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, excluded, False)
    keys = groups.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = keys.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(-1, experts)
    if scoring == Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    elif scoring == Scoring.SIGMOID_OF_CHOSEN:
        weights = weights.sigmoid()
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return experts, weights * scaling_factor


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-text.FLOAT32_MAX)  # and infinities become the largest and the smallest float32


def _reference(
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor,
    gate_up_weight: Tensor,
    gate_up_scales: Tensor,
    gate_up_tensor_scale: Tensor,
    gate_up_bias: Tensor,
    down_weight: Tensor,
    down_scales: Tensor,
    down_tensor_scale: Tensor,
    down_bias: Tensor,
    shared_gate_up_weight: Tensor,
    shared_gate_up_scales: Tensor,
    shared_gate_up_tensor_scale: Tensor,
    shared_gate_up_bias: Tensor,
    shared_down_weight: Tensor,
    shared_down_scales: Tensor,
    shared_down_tensor_scale: Tensor,
    shared_down_bias: Tensor,
    shared_gate: Tensor,
    input_tensor_scale: Tensor,
    hidden_tensor_scale: Tensor,
    *,
    scale_input: int,
    activation: int,
    gated: int,
    alpha: float,
    limit: float,
    shared: int,
    shared_gated: int,
    quantize_activations: int,
    **routing: int | float,
) -> Tensor:
    act = Activation(activation)
    matrix = x.float().reshape(-1, x.shape[-1])

    def hidden_of(product: Tensor) -> Tensor:
        return gate(act, product[:, 0::2], product[:, 1::2], alpha, limit) if gated else activate(act, product)

    experts, weights = route(router_logits.reshape(-1, router_logits.shape[-1]), correction_bias, **routing)  # type: ignore[arg-type]
    rows = matrix.unsqueeze(1) * (weights if scale_input else torch.ones_like(weights)).unsqueeze(-1)
    rows = rows.to(x.dtype).float()
    rows = gemm_input(rows, x.dtype, quantize_activations, input_tensor_scale)
    hidden = rows.new_empty(*experts.shape, 2 * down_weight.shape[-1])
    outputs = rows.new_empty(*experts.shape, down_weight.shape[-2])
    chosen = sorted(set(experts.flatten().tolist()))
    for e in chosen:
        weight = dequantize_weight(gate_up_weight[e], gate_up_scales[e], gate_up_tensor_scale[e])
        hidden[experts == e] = hidden_of(linear(rows[experts == e], weight, gate_up_bias[e]))
    hidden = gemm_input(hidden, x.dtype, quantize_activations, hidden_tensor_scale)
    for e in chosen:
        weight = dequantize_weight(down_weight[e], down_scales[e], down_tensor_scale[e])
        outputs[experts == e] = linear(hidden[experts == e], weight, down_bias[e])

    y = torch.zeros_like(outputs[:, 0])
    for rank in range(experts.shape[1]):
        y = y + (outputs[:, rank] if scale_input else weights[:, rank, None] * outputs[:, rank])
    if shared:
        seen = gemm_input(matrix, x.dtype, quantize_activations, input_tensor_scale)
        weight = dequantize_weight(shared_gate_up_weight, shared_gate_up_scales, shared_gate_up_tensor_scale)
        shared_hidden = hidden_of(linear(seen, weight, shared_gate_up_bias))
        shared_hidden = gemm_input(shared_hidden, x.dtype, quantize_activations, hidden_tensor_scale)
        weight = dequantize_weight(shared_down_weight, shared_down_scales, shared_down_tensor_scale)
        output = linear(shared_hidden, weight, shared_down_bias)
        y = y + (output * (matrix @ shared_gate.float()).sigmoid().unsqueeze(-1) if shared_gated else output)
    return y.to(x.dtype).reshape(x.shape)


def _shapes(rule: ShapeRule) -> list[Shape]:
    attributes = rule.attributes
    gated = attributes["gated"]
    if not gated:
        rule.expect_ungated_activation()
    lead, h = rule.rows("x")
    logits = rule.shapes["router_logits"]
    experts = logits[-1] if logits else None
    if not isinstance(experts, int) or not 1 <= experts <= MAX_EXPERTS:
        raise rule.error(f"the last dimension of router_logits must be 1 to {MAX_EXPERTS} experts, found {experts}")
    rule.expect("router_logits", (*lead, experts))
    rule.expect("correction_bias", (experts,))
    _check_groups(rule, experts)

    def mlp(prefix: str, batch: Shape) -> None:
        up, down = f"{prefix}gate_up", f"{prefix}down"
        n = rule.weight(f"{up}_weight", f"{up}_scales", h, batch)
        if gated and n % 2:
            raise rule.error(f"{up}_weight must have an even number of rows (gate and up), found {n}")
        rule.weight(f"{down}_weight", f"{down}_scales", n // 2 if gated else n, batch)
        rule.expect(f"{down}_bias", (*batch, h))
        rule.expect(f"{up}_bias", (*batch, n))
        for projection in (up, down):
            rule.expect(f"{projection}_tensor_scale", batch)

    mlp("", (experts,))
    mlp("shared_", ())
    rule.expect("shared_gate", (h,))
    rule.expect("input_tensor_scale", ())
    rule.expect("hidden_tensor_scale", ())
    return [(*lead, h)]


def _check_groups(rule: ShapeRule, experts: int) -> None:
    top_k, groups, open_groups, best = (
        rule.attributes[name] for name in ("top_k", "n_group", "topk_group", "group_score_top")
    )
    if experts % groups:
        raise rule.error(f"n_group must divide the number of experts, {experts}, found {groups}")
    if open_groups > groups:
        raise rule.error(f"topk_group must be at most n_group, {groups}, found {open_groups}")
    if best > experts // groups:
        raise rule.error(f"group_score_top must be at most the {experts // groups} experts of a group, found {best}")
    if top_k > open_groups * (experts // groups):
        raise rule.error(f"top_k must be at most the {open_groups * (experts // groups)} experts open, found {top_k}")


def _hidden(y: str, product: str) -> str:
    return f"""{y} = If(gated) <
            then_branch = {y}_gated () => ({y}_with_gate) {{
                {text.split_gate_up(f"{y}_gate_half", f"{y}_up_half", product)}
                {gate_onnx(f"{y}_with_gate", f"{y}_gate_half", f"{y}_up_half")} }},
            else_branch = {y}_plain () => ({y}_without_gate) {{ {activate_onnx(f"{y}_without_gate", product)} }}
        >"""


def _each_expert(y: str, first: str, rows: str, projection: str, activated: bool) -> str:
    """y [M, top_k, N]: the projection of rows [M, top_k, K] by the expert of each; `first` is y's zeros. An expert
    that nobody chose is not decoded."""
    result = _hidden(f"{y}_result", f"{y}_product") if activated else f"{y}_result = Identity({y}_product)"
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
                        {y}_packed = Gather({projection}_weight, {y}_e)
                        {y}_scales = Gather({projection}_scales, {y}_e)
                        {y}_tensor_scale = Gather({projection}_tensor_scale, {y}_e)
                        {y}_bias = Gather({projection}_bias, {y}_e)
                        {text.dequantize_weight(f"{y}_w", f"{y}_packed", f"{y}_scales", f"{y}_tensor_scale")}
                        {text.linear(f"{y}_product", f"{y}_rows", f"{y}_w", f"{y}_bias")}
                        {result}
                        {y}_result_rows = Unsqueeze({y}_result, axis_ranks)
                        {y}_new = Where({y}_chosen_rows, {y}_result_rows, {y}_before) }},
                    else_branch = {y}_skip () => ({y}_same) {{ {y}_same = Identity({y}_before) }}
                >
            }}
        >"""


def _finite_onnx(y: str, x: str) -> str:
    return f"""{y}_nan = IsNaN({x})
        {y}_number = Where({y}_nan, lowest, {x})
        {y}_bounded = Min({y}_number, largest)
        {y} = Max({y}_bounded, lowest)"""


_ROUTING = f"""
        largest = Constant<value_float: float = {text.FLOAT32_MAX!r}>()
        lowest = Neg(largest)
        below_lowest = Constant<value_float: float = -inf>()
        axis_ranks = Constant<value = int64[1] {{1}}>()
        first_axis = Constant<value = int64[1] {{0}}>()
        {text.attribute_int("scoring")}
        {text.attribute_flag("renormalize")}
        {text.attribute_float("scaling_factor")}
        {text.attribute_int("top_k")}
        {text.attribute_int("n_group")}
        {text.attribute_int("topk_group")}
        {text.attribute_int("group_score_top")}
        ranks = Unsqueeze(top_k, first_axis)
        groups = Unsqueeze(n_group, first_axis)
        open_groups = Unsqueeze(topk_group, first_axis)
        best_of_group = Unsqueeze(group_score_top, first_axis)
        softmax_number = Constant<value = int64 {{{int(Scoring.SOFTMAX)}}}>()
        sigmoid_number = Constant<value = int64 {{{int(Scoring.SIGMOID)}}}>()
        softmax_of_chosen_number = Constant<value = int64 {{{int(Scoring.SOFTMAX_OF_CHOSEN)}}}>()
        sigmoid_of_chosen_number = Constant<value = int64 {{{int(Scoring.SIGMOID_OF_CHOSEN)}}}>()
        is_softmax = Equal(scoring, softmax_number)
        is_sigmoid = Equal(scoring, sigmoid_number)
        is_softmax_of_chosen = Equal(scoring, softmax_of_chosen_number)
        is_sigmoid_of_chosen = Equal(scoring, sigmoid_of_chosen_number)
        {text.rows("logit_rows", "router_logits")}
        {_finite_onnx("logits", "logit_rows")}
        probabilities = Softmax<axis = -1>(logits)
        sigmoids = Sigmoid(logits)
        sigmoids_or_logits = Where(is_sigmoid, sigmoids, logits)
        scores = Where(is_softmax, probabilities, sigmoids_or_logits)
        biased = Add(scores, correction_bias)
        {_finite_onnx("keys", "biased")}
        any_tokens = Constant<value = int64[1] {{0}}>()
        by_group = Concat<axis = 0>(any_tokens, groups, axis_last)
        group_keys = Reshape(keys, by_group)
        best_keys, best_places = TopK<axis = -1>(group_keys, best_of_group)
        group_scores = ReduceSum<keepdims = 0>(best_keys, axis_last)
        open_scores, open_places = TopK<axis = -1>(group_scores, open_groups)
        zero = Constant<value = int64 {{0}}>()
        one = Constant<value = int64 {{1}}>()
        group_numbers = Range(zero, n_group, one)
        open_columns = Unsqueeze(open_places, axis_last)
        group_is_open_place = Equal(open_columns, group_numbers)
        group_open_ones = Cast<to = {text.FLOAT}>(group_is_open_place)
        group_open_count = ReduceSum<keepdims = 0>(group_open_ones, axis_ranks)
        group_open = Greater(group_open_count, zero_f)
        group_open_column = Unsqueeze(group_open, axis_last)
        open_group_keys = Where(group_open_column, group_keys, below_lowest)
        logits_shape = Shape(logits)
        open_keys = Reshape(open_group_keys, logits_shape)
        chosen_keys, experts = TopK<axis = -1>(open_keys, ranks)
        chosen_scores = GatherElements<axis = 1>(scores, experts)
        chosen_softmax = Softmax<axis = -1>(chosen_scores)
        chosen_sigmoid = Sigmoid(chosen_scores)
        sigmoid_or_score = Where(is_sigmoid_of_chosen, chosen_sigmoid, chosen_scores)
        raw_weights = Where(is_softmax_of_chosen, chosen_softmax, sigmoid_or_score)
        smallest_sum = Constant<value_float: float = {_SMALLEST_SUM}>()
        chosen_sum = ReduceSum<keepdims = 1>(raw_weights, axis_last)
        divisor = Add(chosen_sum, smallest_sum)
        normalized = Div(raw_weights, divisor)
        unscaled_weights = Where(renormalize, normalized, raw_weights)
        weights = Mul(unscaled_weights, scaling_factor)
"""

_SHARED = f"""
                {text.gemm_input("shared_seen", "x_rows", "input_tensor_scale", "x")}
                {
    text.dequantize_weight(
        "shared_up_w", "shared_gate_up_weight", "shared_gate_up_scales", "shared_gate_up_tensor_scale"
    )
}
                {text.linear("shared_product", "shared_seen", "shared_up_w", "shared_gate_up_bias")}
                {_hidden("shared_hidden", "shared_product")}
                {text.gemm_input("shared_hidden_seen", "shared_hidden", "hidden_tensor_scale", "x")}
                {
    text.dequantize_weight("shared_down_w", "shared_down_weight", "shared_down_scales", "shared_down_tensor_scale")
}
                {text.linear("shared_output", "shared_hidden_seen", "shared_down_w", "shared_down_bias")}
                shared_gate_float = Cast<to = {text.FLOAT}>(shared_gate)
                shared_gate_column = Unsqueeze(shared_gate_float, axis_last)
                shared_gate_logit = MatMul(x_rows, shared_gate_column)
                shared_gate_sigmoid = Sigmoid(shared_gate_logit)
                shared_factor = Where(shared_gated, shared_gate_sigmoid, one_f)
                shared_scaled = Mul(shared_output, shared_factor)
                with_shared_sum = Add(routed, shared_scaled)
"""

_BODY = f"""
        {text.constants()}
        {_ROUTING}
        {text.attribute_flag("scale_input")}
        {text.attribute_int("activation")}
        {text.attribute_flag("gated")}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {text.attribute_flag("shared")}
        {text.attribute_flag("shared_gated")}
        {text.attribute_flag("quantize_activations")}
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
        {text.gemm_input("seen_matrix", "x_matrix", "input_tensor_scale", "x")}
        seen = Reshape(seen_matrix, x_by_rank_shape)
        half_intermediate = Shape<start = -1>(down_weight)
        intermediate = Add(half_intermediate, half_intermediate)
        weights_shape = Shape(weights)
        hidden_shape = Concat<axis = 0>(weights_shape, intermediate)
        no_hidden = ConstantOfShape(hidden_shape)
        {_each_expert("expert_hidden", "no_hidden", "seen", "gate_up", True)}
        hidden_matrix_shape = Concat<axis = 0>(axis_last, intermediate)
        hidden_matrix = Reshape(expert_hidden, hidden_matrix_shape)
        {text.gemm_input("hidden_seen_matrix", "hidden_matrix", "hidden_tensor_scale", "x")}
        hidden_seen = Reshape(hidden_seen_matrix, hidden_shape)
        no_output = ConstantOfShape(x_by_rank_shape)
        {_each_expert("expert_output", "no_output", "hidden_seen", "down", False)}
        output_factor_columns = Unsqueeze(output_factors, axis_last)
        weighted = Mul(expert_output, output_factor_columns)
        routed = ReduceSum<keepdims = 0>(weighted, axis_ranks)
        sum = If(shared) <
            then_branch = with_shared () => (with_shared_sum) {{ {_SHARED} }},
            else_branch = without_shared () => (routed_alone) {{ routed_alone = Identity(routed) }}
        >
        sum_typed = CastLike(sum, x)
        {text.with_rows_of("y", "sum_typed", "x")}
"""

NVFP4_MOE = OpDefinition(
    name="NVFP4MoE",
    doc="""A mixture of E experts. Each row of x goes to the top_k experts of the highest keys; a key is the expert's
score + correction_bias, ties go to the lower index, and a logit that is NaN counts as the lowest float32. scoring 0:
scores are the softmax of the logits; 1: their sigmoid; 2 and 3: the logits, and the softmax or sigmoid of the chosen
ones weighs them. With n_group > 1 only the topk_group groups of neighbouring experts whose group_score_top best keys
have the largest sums are open. An expert's weight is its score (without the bias), with renormalize divided by the sum
of the chosen ones + 1e-20, times scaling_factor. y = sum of weight * expert(x) in order of rank, float32, + the shared
expert (shared 1), * sigmoid(x . shared_gate) (shared_gated 1); with scale_input the weight scales the expert's input
instead. expert(x) = down(act(gate(x)) * up(x)) or, gated 0, down(act(up(x))); hidden activations are rounded to x's
type, or with quantize_activations to NVFP4, as x is. E is at most 1024, top_k at most 64.""",
    inputs=(
        Formal("x", "T", "[..., H], H a multiple of 16"),
        Formal("router_logits", "tensor(float)", "[..., E]"),
        Formal("correction_bias", "tensor(float)", "[E] added to the scores for the choice only"),
        Formal("gate_up_weight", "tensor(int8)", "[E, N1, H/2] E2M1, two per byte; N1 = 2I if gated, else I"),
        Formal("gate_up_scales", "tensor(int8)", "[E, ceil(N1/128)*128, ceil(H/16/4)*4] E4M3 bytes, each 128x4 tiled"),
        Formal("gate_up_tensor_scale", "tensor(float)", "[E] multipliers"),
        Formal("gate_up_bias", "T", "[E, N1]"),
        Formal("down_weight", "tensor(int8)", "[E, H, I/2], I a multiple of 16"),
        Formal("down_scales", "tensor(int8)", "[E, ceil(H/128)*128, ceil(I/16/4)*4] E4M3 bytes, each 128x4 tiled"),
        Formal("down_tensor_scale", "tensor(float)", "[E] multipliers"),
        Formal("down_bias", "T", "[E, H]"),
        Formal("shared_gate_up_weight", "tensor(int8)", "[S1, H/2]; S1 = 2S alternating if gated, else S"),
        Formal("shared_gate_up_scales", "tensor(int8)", "[ceil(S1/128)*128, ceil(H/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("shared_gate_up_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("shared_gate_up_bias", "T", "[S1]"),
        Formal("shared_down_weight", "tensor(int8)", "[H, S/2], S a multiple of 16; the smallest if shared is 0"),
        Formal("shared_down_scales", "tensor(int8)", "[ceil(H/128)*128, ceil(S/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("shared_down_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("shared_down_bias", "T", "[H]"),
        Formal("shared_gate", "T", "[H]; its values are not read unless shared_gated is 1"),
        Formal("input_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
        Formal("hidden_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    outputs=(Formal("y", "T", "[..., H]"),),
    attributes={
        "top_k": 1,
        "scoring": int(Scoring.SOFTMAX),
        "renormalize": 0,
        "scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "group_score_top": 1,
        "scale_input": 0,
        "activation": int(Activation.SILU),
        "gated": 1,
        "alpha": 1.702,
        "limit": 7.0,
        "shared": 0,
        "shared_gated": 0,
        "quantize_activations": 0,
        "static_scales": 0,
    },
    body=_BODY,
    torch_reference=_reference,
    shape_rule=_shapes,
    ranges={
        "top_k": (1, MAX_TOP_K),
        "scoring": (0, len(Scoring) - 1),
        "n_group": (1, MAX_EXPERTS),
        "topk_group": (1, MAX_EXPERTS),
        "group_score_top": (1, MAX_EXPERTS),
    },
)
