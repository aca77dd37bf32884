"""What both mixtures of experts add up: single MLPs weighted by the routing, and the shared expert."""

import pytest
import torch
from op_bodies import Inputs, assert_agrees, onnxruntime_outputs
from torch import Tensor

from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.moe_routing import ROUTING_ATTRIBUTES, route
from trt_nvfp4.plugins.ops.weight_format import E4M3, NVFP4, WeightFormat

#: The op, the op of one expert, and the format of their weights.
BOTH = pytest.mark.parametrize(
    ("op", "mlp", "fmt"),
    [("NVFP4MoE", "NVFP4GatedMLP", NVFP4), ("FP8MoE", "FP8GatedMLP", E4M3)],
    ids=["NVFP4MoE", "FP8MoE"],
)


def inputs(op: str, seed: int, dtype: torch.dtype, *shared: int) -> dict[str, Tensor]:
    """Three tokens of 32 values, four experts of 48, by name; ``shared``: gated, and the shared expert's size.

    FP8's scales are given: at run time they would follow from other rows than a single MLP's.
    """
    make = Inputs(seed, dtype)
    sizes = (3,), 32, 48, 4
    tensors = make.fp8_moe(*sizes, *(shared or (1, 16)), 0.02) if op == "FP8MoE" else make.moe(*sizes, *shared)
    return dict(zip([formal.name for formal in OPS[op].inputs], tensors, strict=True))


@BOTH
def test_is_the_weighted_sum_of_gated_mlps(op: str, mlp: str, fmt: WeightFormat, seed: int) -> None:
    tensors = inputs(op, seed, torch.float32, 1, 16)
    expert = OPS[mlp]
    parts = [formal.name for formal in expert.inputs[1:-2]]
    scales = [tensors[formal.name] for formal in expert.inputs[-2:]]
    x, logits, bias = list(tensors.values())[:3]
    outputs = [expert.reference(x, *(tensors[p][e] for p in parts), *scales) for e in range(4)]
    experts, weights = route(logits, bias, **{**ROUTING_ATTRIBUTES, "top_k": 2, "renormalize": 1})  # type: ignore[arg-type]
    expected = expert.reference(x, *(tensors[f"shared_{p}"] for p in parts), *scales)
    assert isinstance(expected, Tensor)
    expected = expected * (x @ tensors["shared_gate"]).sigmoid().unsqueeze(-1)
    for row in range(3):
        for rank in range(2):
            expected[row] += weights[row, rank] * outputs[experts[row, rank]][row]
    y = OPS[op].reference(*tensors.values(), top_k=2, renormalize=1, shared=1, shared_gated=1)
    torch.testing.assert_close(y, expected)


@BOTH
def test_smallest_shared_expert_fits_and_is_not_read(op: str, mlp: str, fmt: WeightFormat, seed: int) -> None:
    tensors = inputs(op, seed, torch.float16)
    expected = OPS[op].reference(*tensors.values(), top_k=2)
    for name, shape in fmt.smallest_shared_expert(32, gated=True).items():
        found = tensors[name]
        assert tuple(found.shape) == shape
        tensors[name] = torch.full_like(found, 127 if found.dtype == torch.int8 else torch.nan)
    assert torch.equal(OPS[op].reference(*tensors.values(), top_k=2), expected)
    assert_agrees(op, list(tensors.values()), onnxruntime_outputs, top_k=2)
