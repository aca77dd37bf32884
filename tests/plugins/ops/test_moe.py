"""NVFP4MoE: routing against Hugging Face's routers, the expert sum against single MLPs, the body against both."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from op_bodies import DTYPES, RUNNERS, Inputs, assert_agrees
from op_inputs import given_logits
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation, OpError
from trt_nvfp4.plugins.ops.moe_routing import Scoring, route

MOE = OPS["NVFP4MoE"]
NAMES = [formal.name for formal in MOE.inputs]
PLAIN_ROUTING = {
    name: MOE.attributes[name]
    for name in ("top_k", "scoring", "renormalize", "scaling_factor", "n_group", "topk_group", "group_score_top")
}
DEEPSEEK = {"top_k": 4, "n_group": 4, "topk_group": 2, "renormalize": 1, "scaling_factor": 2.5}
ROUTERS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3MoeTopKRouter, {"top_k": 4, "renormalize": 1}),
    "olmoe": (Qwen3MoeTopKRouter, {"top_k": 4, "renormalize": 0}),
    "deepseek_v3": (DeepseekV3TopkRouter, {**DEEPSEEK, "scoring": Scoring.SIGMOID, "group_score_top": 2}),
    "deepseek_v2": (DeepseekV2TopkRouter, {**DEEPSEEK, "scoring": Scoring.SOFTMAX, "renormalize": 0}),
    "deepseek_v4": (
        DeepseekV4TopKRouter,
        {"top_k": 4, "scoring": Scoring.SQRT_SOFTPLUS, "renormalize": 1, "scaling_factor": 1.5},
    ),
    "gpt_oss": (GptOssTopKRouter, {"top_k": 3, "scoring": Scoring.SOFTMAX_OF_CHOSEN}),
    "llama4": (Llama4Router, {"top_k": 2, "scoring": Scoring.SIGMOID_OF_CHOSEN}),
}


def routed(logits: Tensor, bias: Tensor, **attributes: Any) -> tuple[Tensor, Tensor]:
    return route(logits, bias, **{**PLAIN_ROUTING, **attributes})


@pytest.mark.parametrize("model", ROUTERS)
def test_routing_is_that_of_hugging_face(model: str, seed: int) -> None:
    router_class, attributes = ROUTERS[model]
    experts = 32
    config = SimpleNamespace(
        num_experts_per_tok=attributes["top_k"],
        num_experts=experts,
        num_local_experts=experts,
        hidden_size=experts,
        norm_topk_prob=bool(attributes.get("renormalize")),
        routed_scaling_factor=attributes.get("scaling_factor", 1.0),
        n_group=attributes.get("n_group", 1),
        topk_group=attributes.get("topk_group", 1),
        topk_method="group_limited_greedy",
        scoring_func="sqrtsoftplus",
    )
    router = router_class(config)
    router.weight.data = torch.eye(experts)  # so that the logits are what it is given
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(50, experts, generator=generator) * 3, torch.zeros(experts)
    if model in ("deepseek_v3", "deepseek_v4"):
        bias = torch.randn(experts, generator=generator)
        router.e_score_correction_bias.copy_(bias)
    if model == "deepseek_v4":
        logits[:10] *= 1e4
    with torch.no_grad():
        *_, weights, chosen = (None, *router(logits))
    if model == "llama4":  # it returns the scores of all experts, and the logits
        weights, chosen = weights.topk(attributes["top_k"], dim=-1)
    found, found_weights = routed(logits, bias, **attributes)
    dense = torch.zeros_like(logits).scatter(1, chosen, weights)
    torch.testing.assert_close(torch.zeros_like(logits).scatter(1, found, found_weights), dense)
    assert torch.equal(found.sort(-1).values, chosen.sort(-1).values)


@pytest.mark.parametrize("scoring", Scoring)
def test_ties_go_to_the_lower_index_and_nan_is_the_lowest(scoring: Scoring) -> None:
    logits = torch.tensor([[1.0, 2, 2, torch.nan, 2], [torch.nan] * 5, [torch.nan, -torch.inf, 0, 0, torch.inf]])
    experts, weights = routed(logits, torch.zeros(5), top_k=4, scoring=scoring)
    assert experts[0].tolist() == [1, 2, 4, 0]
    assert experts[1].tolist() == [0, 1, 2, 3]
    assert experts[2, :3].tolist() == ([4, 2, 3] if scoring is not Scoring.SOFTMAX else [4, 0, 1])
    assert weights.isfinite().all() or scoring is Scoring.SIGMOID


def test_the_bias_chooses_and_does_not_weigh() -> None:
    experts, weights = routed(torch.zeros(1, 4), torch.tensor([0.0, 3, 1, 2]), top_k=2, scoring=Scoring.SIGMOID)
    assert experts.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_zeros_renormalised_stay_zeros() -> None:
    logits = torch.tensor([[-1000.0, -2000.0]])
    _, weights = routed(logits, torch.zeros(2), top_k=2, scoring=Scoring.SIGMOID, renormalize=1)
    assert weights.tolist() == [[0.0, 0.0]]


def test_given_weights_are_the_weights(seed: int) -> None:
    logits = given_logits(np.random.default_rng(seed), 30, 16, 5)
    experts, weights = routed(logits, torch.zeros(16), top_k=5, scoring=Scoring.GIVEN, scaling_factor=1.5)
    dense = torch.zeros_like(logits).scatter(1, experts, weights)
    assert torch.equal(dense, 1.5 * logits.nan_to_num(0).where(logits > torch.finfo(torch.float32).min, 0))
    _, shares = routed(-logits.abs(), torch.zeros(16), top_k=5, scoring=Scoring.GIVEN, renormalize=1)
    torch.testing.assert_close(shares.sum(1), (torch.arange(30) % 6 > 0).float())


@RUNNERS
@pytest.mark.parametrize("most", [1, 4])
def test_body_of_fewer_experts_given_than_chosen(runner: Any, most: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).moe((7,), 32, 16, 6)
    tensors[1] = given_logits(np.random.default_rng(seed), 7, 6, most)
    assert_agrees("NVFP4MoE", tensors, runner, top_k=4, scoring=int(Scoring.GIVEN))


@RUNNERS
@pytest.mark.parametrize("model", ROUTERS)
def test_body_routes_like_the_reference(runner: Any, model: str, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).moe((2, 5), 32, 16, 16)
    assert_agrees("NVFP4MoE", tensors, runner, **ROUTERS[model][1])


@RUNNERS
@pytest.mark.parametrize("quantize_activations", [0, 1])
@pytest.mark.parametrize("activation", [GATED_ONLY[0], Activation.RELU2])
@pytest.mark.parametrize(
    "attributes",
    [
        {"top_k": 2, "renormalize": 1},
        {"top_k": 3, "shared": 1},
        {"top_k": 1, "scoring": 3, "scale_input": 1, "shared": 1},
        {"top_k": 2, "shared": 1, "shared_gated": 1, "scaling_factor": 0.5},
    ],
    ids=str,
)
def test_body_variants(
    runner: Any, attributes: dict[str, Any], activation: Activation, quantize_activations: int, seed: int
) -> None:
    gated = int(activation is not Activation.RELU2)
    tensors = Inputs(seed, torch.float32).moe((4,), 32, 48, 6, gated, 32)
    flags = {"gated": gated, "quantize_activations": quantize_activations, "alpha": 1.5, "limit": 0.75}
    assert_agrees("NVFP4MoE", tensors, runner, activation=int(activation), **flags, **attributes)


@RUNNERS
@DTYPES
@pytest.mark.parametrize("lead", [(), (5,), (2, 1, 3)], ids=str)
def test_body_types_and_shapes(runner: Any, dtype: torch.dtype, lead: tuple[int, ...], seed: int) -> None:
    tensors = Inputs(seed, dtype).moe(lead, 144, 32, 5, 1, 48)
    assert_agrees("NVFP4MoE", tensors, runner, top_k=2, shared=1)


@RUNNERS
@pytest.mark.parametrize("scoring", [Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS, Scoring.GIVEN])
def test_body_of_logits_that_are_nan_infinite_equal_or_far(runner: Any, scoring: Scoring, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).moe((4,), 32, 16, 6)
    tensors[1][0] = torch.nan
    tensors[1][1, 2:4] = torch.tensor([torch.inf, -torch.inf])
    tensors[1][2] = 1.0
    tensors[1][3] = torch.tensor([-1e4, 1e4, -30, 2e4, -1e4, 30])
    assert_agrees("NVFP4MoE", tensors, runner, top_k=3, scoring=int(scoring), renormalize=1)


@RUNNERS
def test_body_of_one_expert_for_all_tokens(runner: Any, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).moe((7,), 32, 16, 4)
    tensors[2] = torch.tensor([0.0, 0, 100, 0])
    assert routed(tensors[1], tensors[2])[0].unique().tolist() == [2]
    assert_agrees("NVFP4MoE", tensors, runner)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"top_k": 9}, "top_k must be at most the 8 experts open, found 9"),
        ({"top_k": 65}, "top_k must be 1 to 64, found 65"),
        ({"top_k": 0}, "top_k must be 1 to 64, found 0"),
        ({"top_k": 5, "n_group": 4, "topk_group": 2}, "at most the 4 experts open, found 5"),
        ({"n_group": 3}, "n_group must divide the number of experts, 8, found 3"),
        ({"n_group": 2, "topk_group": 3}, "topk_group must be at most n_group, 2, found 3"),
        ({"n_group": 4, "group_score_top": 3}, "at most the 2 experts of a group, found 3"),
        ({"scoring": 6}, "scoring must be 0 to 5, found 6"),
        ({"scaling_factor": float("inf")}, "scaling_factor must be finite"),
        ({"gated": 0, "activation": 7}, "needs a gate"),
    ],
)
def test_attribute_errors(attributes: dict[str, Any], message: str, seed: int) -> None:
    tensors = Inputs(seed, torch.float16).moe((3,), 32, 16, 8)
    with pytest.raises(OpError, match=f"NVFP4MoE: .*{message}"):
        MOE.reference(*tensors, **attributes)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("router_logits", (3, 1025), "1 to 1024 experts, found 1025"),
        ("router_logits", (4, 8), r"router_logits must have shape \[3, 8\], found \[4, 8\]"),
        ("gate_up_weight", (7, 32, 16), r"gate_up_weight must have shape \[8, 32, 16\], found \[7, 32, 16\]"),
        ("gate_up_weight", (8, 33, 16), "even number of rows"),
        ("down_weight", (8, 48, 8), r"down_bias must have shape \[8, 48\], found \[8, 32\]"),
        ("down_tensor_scale", (), r"down_tensor_scale must have shape \[8\]"),
        ("shared_down_weight", (1, 1), r"shared_down_weight must have shape \[1, 8\]|shared_down_bias must have"),
        ("shared_gate", (31,), r"shared_gate must have shape \[32\]"),
    ],
)
def test_shape_errors(name: str, shape: tuple[int, ...], message: str, seed: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in Inputs(seed, torch.float16).moe((3,), 32, 16, 8)]
    assert MOE.output_shapes(shapes) == [(3, 32)]
    shapes[NAMES.index(name)] = shape
    if name == "gate_up_weight":
        shapes[NAMES.index("gate_up_scales")] = (shape[0], 128, 4)
        shapes[NAMES.index("gate_up_bias")] = shape[:2]
    with pytest.raises(OpError, match=message):
        MOE.output_shapes(shapes)


@pytest.mark.parametrize("prefix", ["", "shared_"])
def test_experts_give_rows_like_those_they_take(prefix: str, seed: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in Inputs(seed, torch.float16).moe((3,), 32, 16, 8)]
    for name, rows in ((f"{prefix}down_weight", -2), (f"{prefix}down_bias", -1)):
        shape = list(shapes[NAMES.index(name)])
        shape[rows] = 48
        shapes[NAMES.index(name)] = tuple(shape)
    with pytest.raises(OpError, match=f"{prefix}down_weight must have as many rows as x has columns, 32, found 48"):
        MOE.output_shapes(shapes)


def test_logits_are_float32(seed: int) -> None:
    tensors = Inputs(seed, torch.float16).moe((3,), 32, 16, 8)
    tensors[1] = tensors[1].half()
    with pytest.raises(OpError, match=r"router_logits must be tensor\(float\), found tensor\(float16\)"):
        MOE.reference(*tensors)
