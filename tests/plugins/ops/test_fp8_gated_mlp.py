"""FP8GatedMLP's ONNX function body, run by ONNX Runtime and the reference evaluator, against its Torch reference."""

from typing import Any

import pytest
import torch
from op_bodies import DTYPES, RUNNERS, Inputs, assert_agrees

from trt_nvfp4.plugins.ops import OPS, Activation, OpError


@RUNNERS
@DTYPES
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_types_and_shapes(runner: Any, dtype: torch.dtype, lead: tuple[int, ...], scale: float, seed: int) -> None:
    attributes = {"activation": int(Activation.GELU_TANH)}
    assert_agrees("FP8GatedMLP", Inputs(seed, dtype).fp8_gated_mlp(lead, 32, 48, 33, scale), runner, **attributes)


@RUNNERS
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_activations(runner: Any, activation: Activation, seed: int) -> None:
    inputs = Inputs(seed, torch.float32).fp8_gated_mlp((4,), 32, 48, 33)
    assert_agrees("FP8GatedMLP", inputs, runner, activation=int(activation), alpha=1.5, limit=2.0)


@pytest.mark.parametrize(("position", "shape"), [(1, (96, 48)), (1, (95, 32)), (2, (95,)), (4, (33, 32)), (6, (32,))])
def test_refuses_shapes_that_do_not_fit(position: int, shape: tuple[int, ...], seed: int) -> None:
    inputs = Inputs(seed, torch.float32).fp8_gated_mlp((4,), 32, 48, 33)
    inputs[position] = torch.zeros(shape, dtype=inputs[position].dtype)
    with pytest.raises(OpError, match="FP8GatedMLP"):
        OPS["FP8GatedMLP"].reference(*inputs)


def test_static_scales_are_a_promise(seed: int) -> None:
    with pytest.raises(OpError, match="static_scales promises a input_scale that is not 0"):
        OPS["FP8GatedMLP"].reference(*Inputs(seed, torch.float32).fp8_gated_mlp((4,), 32, 48, 33), static_scales=1)
