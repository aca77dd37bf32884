"""How a router's logits choose experts and weigh them: what NVFP4MoE and FP8MoE have in common of it."""

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.definition import ShapeRule

MAX_EXPERTS = 1024
MAX_TOP_K = 64
_SMALLEST_SUM = 1e-20  # DeepSeek-V3's: renormalised zeros stay zeros


class Scoring(IntEnum):
    """The `scoring` attribute: what an expert's score is, before the choice (0, 1, 4) or after it (2, 3, 5)."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2  # gpt-oss
    SIGMOID_OF_CHOSEN = 3  # Llama 4
    SQRT_SOFTPLUS = 4  # DeepSeek-V4
    GIVEN = 5  # weights of a routing outside of the op; of fewer than top_k experts, the others' logits being -inf


def scores_of(logits: Tensor, scoring: Scoring) -> Tensor:
    """Scores that choose the experts, before bias and groups, from logits [..., E]."""
    if scoring == Scoring.SOFTMAX:
        return logits.softmax(-1)
    if scoring == Scoring.SIGMOID:
        return logits.sigmoid()
    if scoring == Scoring.SQRT_SOFTPLUS:
        return softplus(logits).sqrt()
    return logits


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
    scores = scores_of(logits, Scoring(scoring))
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
    elif scoring == Scoring.GIVEN:
        weights = weights.masked_fill(weights <= -text.FLOAT32_MAX, 0)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return experts, weights * scaling_factor


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-text.FLOAT32_MAX)  # and infinities become the largest and the smallest float32


def check_groups(rule: ShapeRule, experts: int) -> None:
    """The attributes fit one another and `experts`."""
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


def _finite_onnx(y: str, x: str) -> str:
    return f"""{y}_nan = IsNaN({x})
        {y}_number = Where({y}_nan, lowest, {x})
        {y}_bounded = Min({y}_number, largest)
        {y} = Max({y}_bounded, lowest)"""


#: Statements that leave `experts` and `weights`, [M, top_k], and what they share with the sum of experts.
ROUTING = f"""
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
        sqrt_softplus_number = Constant<value = int64 {{{int(Scoring.SQRT_SOFTPLUS)}}}>()
        given_number = Constant<value = int64 {{{int(Scoring.GIVEN)}}}>()
        is_softmax = Equal(scoring, softmax_number)
        is_sigmoid = Equal(scoring, sigmoid_number)
        is_softmax_of_chosen = Equal(scoring, softmax_of_chosen_number)
        is_sigmoid_of_chosen = Equal(scoring, sigmoid_of_chosen_number)
        is_sqrt_softplus = Equal(scoring, sqrt_softplus_number)
        is_given = Equal(scoring, given_number)
        {text.rows("logit_rows", "router_logits")}
        {_finite_onnx("logits", "logit_rows")}
        probabilities = Softmax<axis = -1>(logits)
        sigmoids = Sigmoid(logits)
        softplus = Softplus(logits)
        roots = Sqrt(softplus)
        roots_or_logits = Where(is_sqrt_softplus, roots, logits)
        sigmoids_or_others = Where(is_sigmoid, sigmoids, roots_or_logits)
        scores = Where(is_softmax, probabilities, sigmoids_or_others)
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
        above_lowest = Greater(chosen_scores, lowest)
        given_or_zero = Where(above_lowest, chosen_scores, zero_f)
        given_or_score = Where(is_given, given_or_zero, chosen_scores)
        sigmoid_or_score = Where(is_sigmoid_of_chosen, chosen_sigmoid, given_or_score)
        raw_weights = Where(is_softmax_of_chosen, chosen_softmax, sigmoid_or_score)
        smallest_sum = Constant<value_float: float = {_SMALLEST_SUM}>()
        chosen_sum = ReduceSum<keepdims = 1>(raw_weights, axis_last)
        divisor = Add(chosen_sum, smallest_sum)
        normalized = Div(raw_weights, divisor)
        unscaled_weights = Where(renormalize, normalized, raw_weights)
        weights = Mul(unscaled_weights, scaling_factor)
"""

ROUTING_ATTRIBUTES = {
    "top_k": 1,
    "scoring": int(Scoring.SOFTMAX),
    "renormalize": 0,
    "scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "group_score_top": 1,
}
ROUTING_RANGES = {
    "top_k": (1, MAX_TOP_K),
    "scoring": (0, len(Scoring) - 1),
    "n_group": (1, MAX_EXPERTS),
    "topk_group": (1, MAX_EXPERTS),
    "group_score_top": (1, MAX_EXPERTS),
}
