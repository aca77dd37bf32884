"""NVFP4MoEDecoder: NVFP4Decoder's layers with a mixture of experts in place of the MLP."""

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.definition import Formal, ShapeRule
from trt_nvfp4.plugins.ops.moe_routing import MAX_EXPERTS, MAX_TOP_K, Scoring, route
from trt_nvfp4.plugins.ops.nvfp4_decoder import (
    Attributes,
    Layer,
    LayerMlp,
    check_gated,
    gated,
    gated_onnx,
    layers_op,
    weight_formals,
)

_INPUTS = (
    Formal("router_weight", "T", "[L, E, K]"),
    *weight_formals("up", "2I", "K", "L, E"),
    *weight_formals("down", "K", "I", "L, E"),
)
_EXPERTS = tuple(formal.name for formal in _INPUTS[1:])
#: Members of moe_routing.Scoring that need only the logits, without bias and groups.
SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SOFTMAX_OF_CHOSEN)


def _mixture(rows: Tensor, dtype: torch.dtype, layer: Layer, attributes: Attributes) -> Tensor:
    matrix = rows.reshape(-1, rows.shape[-1])
    router = layer["router_weight"].float()
    experts, weights = route(
        matrix @ router.T,
        router.new_zeros(router.shape[0]),
        top_k=int(attributes["top_k"]),
        scoring=int(attributes["scoring"]),
        renormalize=int(attributes["renormalize"]),
        scaling_factor=attributes["scaling_factor"],
        n_group=1,
        topk_group=1,
        group_score_top=1,
    )
    outputs = matrix.new_empty(*experts.shape, matrix.shape[-1])
    for expert in set(experts.flatten().tolist()):
        own = {name: layer[name][expert] for name in _EXPERTS}
        chosen = experts == expert
        outputs[chosen] = gated(matrix[chosen.any(-1)], dtype, own, attributes)
    return (outputs * weights.unsqueeze(-1)).sum(1).reshape(rows.shape)


def _shapes(rule: ShapeRule, layers: int, k: int) -> None:
    router = rule.shapes["router_weight"]
    experts = router[1] if len(router) == 3 else None
    if not isinstance(experts, int) or not 1 <= experts <= MAX_EXPERTS:
        raise rule.error(f"router_weight must be [L, E, K] with 1 to {MAX_EXPERTS} experts, found {list(router)}")
    rule.expect("router_weight", (layers, experts, k))
    if (top_k := rule.attributes["top_k"]) > experts:
        raise rule.error(f"top_k must be at most the {experts} experts, found {top_k}")
    check_gated(rule, k, (layers, experts))


_CONSTANTS = f"""{text.attribute_int("top_k")}
        {text.attribute_int("scoring")}
        {text.attribute_flag("renormalize")}
        {text.attribute_float("scaling_factor")}
        moe_ranks = Unsqueeze(top_k, index_0)
        moe_softmax = Constant<value = int64 {{{int(Scoring.SOFTMAX)}}}>()
        moe_sigmoid = Constant<value = int64 {{{int(Scoring.SIGMOID)}}}>()
        moe_softmax_of_chosen = Constant<value = int64 {{{int(Scoring.SOFTMAX_OF_CHOSEN)}}}>()
        moe_is_softmax = Equal(scoring, moe_softmax)
        moe_is_sigmoid = Equal(scoring, moe_sigmoid)
        moe_is_softmax_of_chosen = Equal(scoring, moe_softmax_of_chosen)
        moe_largest = Constant<value_float: float = {text.FLOAT32_MAX!r}>()
        moe_lowest = Neg(moe_largest)
        moe_smallest_sum = Constant<value_float: float = 1e-20>()
"""

# Experts that nobody chose are not decoded, and what they make of tokens that did not choose them, Inf perhaps, is left
# out.
_STATEMENTS = f"""moe_router = Cast<to = {text.FLOAT}>(router_weight_i)
            moe_router_t = Transpose<perm = [1, 0]>(moe_router)
            moe_any_logits = MatMul(middle_normed, moe_router_t)
            moe_nan = IsNaN(moe_any_logits)
            moe_numbers = Where(moe_nan, moe_lowest, moe_any_logits)
            moe_bounded = Min(moe_numbers, moe_largest)
            moe_logits = Max(moe_bounded, moe_lowest)
            moe_probabilities = Softmax<axis = -1>(moe_logits)
            moe_sigmoids = Sigmoid(moe_logits)
            moe_others = Where(moe_is_sigmoid, moe_sigmoids, moe_logits)
            moe_scores = Where(moe_is_softmax, moe_probabilities, moe_others)
            moe_chosen_scores, moe_experts = TopK<axis = -1>(moe_scores, moe_ranks)
            moe_chosen_softmax = Softmax<axis = -1>(moe_chosen_scores)
            moe_raw = Where(moe_is_softmax_of_chosen, moe_chosen_softmax, moe_chosen_scores)
            moe_sum = ReduceSum<keepdims = 1>(moe_raw, axis_last)
            moe_divisor = Add(moe_sum, moe_smallest_sum)
            moe_normalized = Div(moe_raw, moe_divisor)
            moe_unscaled = Where(renormalize, moe_normalized, moe_raw)
            moe_weights = Mul(moe_unscaled, scaling_factor)
            moe_count_shape = Shape<start = 0, end = 1>(router_weight_i)
            moe_count = Squeeze(moe_count_shape, index_0)
            moe_shape = Shape(middle)
            moe_none = ConstantOfShape(moe_shape)
            mlp_sum = Loop(moe_count, always, moe_none) <
                body = one_expert (int64 expert, bool expert_condition, float[given, tokens, width] moe_before)
                    => (bool expert_go_on, float[given, tokens, width] moe_after) {{
                    expert_go_on = Identity(expert_condition)
                    expert_chosen = Equal(moe_experts, expert)
                    expert_ones = Cast<to = {text.FLOAT}>(expert_chosen)
                    expert_pairs = ReduceSum<keepdims = 0>(expert_ones)
                    expert_anyone = Greater(expert_pairs, zero_f)
                    moe_after = If(expert_anyone) <
                        then_branch = one_chosen () => (moe_with) {{
                            expert_weights = Mul(expert_ones, moe_weights)
                            expert_weight = ReduceSum<keepdims = 1>(expert_weights, axis_last)
                            {"".join(f" {name}_e = Gather({name}_i, expert)" for name in _EXPERTS)}
                            {gated_onnx("expert_output", "middle_normed", "e")}
                            expert_weighted = Mul(expert_output, expert_weight)
                            expert_count = ReduceSum<keepdims = 1>(expert_ones, axis_last)
                            expert_is_chosen = Greater(expert_count, zero_f)
                            expert_share = Where(expert_is_chosen, expert_weighted, zero_f)
                            moe_with = Add(moe_before, expert_share) }},
                        else_branch = nobody () => (moe_same) {{ moe_same = Identity(moe_before) }}
                    >
                }}
            >"""

NVFP4_MOE_DECODER = layers_op(
    name="NVFP4MoEDecoder",
    doc="""NVFP4Decoder with a mixture of E experts in place of the MLP: x = r + the sum of weight * expert(n) over the
top_k experts of the highest scores, ties going to the lower index; expert(n) = down(act(gate(n)) * up(n)). Logits are
n . router_weight, float32, NaN counting as the lowest. scoring 0: scores are the softmax of the logits; 1: their
sigmoid; 2: the logits, and the softmax of the chosen ones weighs them. An expert's weight is its score, with
renormalize divided by the sum of the chosen ones + 1e-20, times scaling_factor. Up to 16 tokens can take one launch
for all layers (the DECODER tactic; AUTO takes it for one token), which scales hidden values before it rounds them,
where head_dim is a multiple of 16 up to 128, I one of 256, all other sizes are multiples of 32, K is at most 4096, E
256 and top_k 32; else the same weights go through kernels for each part.""",
    mlp=LayerMlp(
        inputs=_INPUTS,
        reference=_mixture,
        shapes=_shapes,
        statements=_STATEMENTS,
        constants=_CONSTANTS,
        attributes={"top_k": 1, "scoring": int(Scoring.SOFTMAX), "renormalize": 0, "scaling_factor": 1.0},
        ranges={"top_k": (1, MAX_TOP_K), "scoring": (0, max(SCORINGS))},
    ),
)
