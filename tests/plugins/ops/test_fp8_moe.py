"""FP8MoE: the body against the Torch reference. Routing: test_moe.py."""

from typing import Any

import pytest
import torch
from op_bodies import DTYPES, RUNNERS, Inputs, assert_agrees

from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation, OpError
from trt_nvfp4.plugins.ops.moe_routing import Scoring

MOE = OPS["FP8MoE"]
NAMES = [formal.name for formal in MOE.inputs]


@RUNNERS
@pytest.mark.parametrize("scale", [0.0, 0.01])
@pytest.mark.parametrize("activation", [GATED_ONLY[0], Activation.RELU2])
@pytest.mark.parametrize(
    "attributes",
    [
        {"top_k": 2, "renormalize": 1},
        {"top_k": 4, "scoring": Scoring.SIGMOID, "n_group": 3, "topk_group": 2, "group_score_top": 2, "shared": 1},
        {"top_k": 1, "scoring": Scoring.SIGMOID_OF_CHOSEN, "scale_input": 1, "shared": 1},
        {"top_k": 2, "shared": 1, "shared_gated": 1, "scaling_factor": 0.5},
    ],
    ids=str,
)
def test_body_variants(
    runner: Any, attributes: dict[str, Any], activation: Activation, scale: float, seed: int
) -> None:
    gated = int(activation is not Activation.RELU2)
    tensors = Inputs(seed, torch.float32).fp8_moe((4,), 32, 48, 6, gated, 32, scale)
    flags = {"gated": gated, "alpha": 1.5, "limit": 0.75, "static_scales": int(scale != 0)}
    assert_agrees("FP8MoE", tensors, runner, activation=int(activation), **flags, **attributes)


@RUNNERS
@DTYPES
@pytest.mark.parametrize("lead", [(), (5,), (2, 1, 3)], ids=str)
def test_body_types_and_shapes(runner: Any, dtype: torch.dtype, lead: tuple[int, ...], seed: int) -> None:
    tensors = Inputs(seed, dtype).fp8_moe(lead, 144, 32, 5, 1, 48)
    assert_agrees("FP8MoE", tensors, runner, top_k=2, shared=1)


@RUNNERS
def test_body_of_one_expert_for_all_tokens(runner: Any, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).fp8_moe((7,), 32, 16, 4)
    tensors[2] = torch.tensor([0.0, 0, 100, 0])
    assert_agrees("FP8MoE", tensors, runner)


def test_static_scales_are_a_promise(seed: int) -> None:
    with pytest.raises(OpError, match="FP8MoE: static_scales promises a input_scale that is not 0"):
        MOE.reference(*Inputs(seed, torch.float32).fp8_moe((4,), 32, 16, 4), static_scales=1)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("router_logits", (4, 8), r"router_logits must have shape \[3, 8\], found \[4, 8\]"),
        ("gate_up_weight", (7, 32, 32), r"gate_up_weight must have shape \[8, 32, 32\], found \[7, 32, 32\]"),
        ("gate_up_weight", (8, 32, 16), r"gate_up_weight must have shape \[8, 32, 32\], found \[8, 32, 16\]"),
        ("gate_up_scale", (8,), r"gate_up_scale must have shape \[8, 32\]"),
        ("shared_down_bias", (31,), r"shared_down_bias must have shape \[32\]"),
        ("hidden_scale", (8,), r"hidden_scale must have shape \[\]"),
    ],
)
def test_shape_errors(name: str, shape: tuple[int, ...], message: str, seed: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in Inputs(seed, torch.float16).fp8_moe((3,), 32, 16, 8)]
    assert MOE.output_shapes(shapes) == [(3, 32)]
    shapes[NAMES.index(name)] = shape
    with pytest.raises(OpError, match=f"FP8MoE: {message}"):
        MOE.output_shapes(shapes)
