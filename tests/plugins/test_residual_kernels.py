"""Residual channels on a GPU: every op that multiplies 4-bit activations against its Torch reference."""

import numpy as np
import pytest
import torch
from nvfp4_reference import Weight
from op_inputs import random_t, router_logits, scalar
from test_kernels import GENERIC, run

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS

pytestmark = pytest.mark.gpu
CHANNELS = 32
OP_NAMES = ["NVFP4Linear", "NVFP4GatedMLP", "NVFP4PersistentMLP", "NVFP4MoE"]


def inputs_of(
    op: str, rng: np.random.Generator, m: int, k: int, i: int, dtype: torch.dtype, channels: int, scale: float
) -> list[torch.Tensor]:
    """K and I are those of activations; weights have `channels` more columns, of values of their own. Some activations
    are twenty times as large as the others."""
    x = random_t(rng, (m, k), dtype)
    x[:, -channels:] *= 20
    x[: m // 2, :16] = 0

    def projection(rows: int, depth: int, *leading: int) -> list[torch.Tensor]:
        weight = Weight.random(rng, rows, depth + channels, leading)
        return [*weight.tensors, random_t(rng, (*leading, rows), dtype)]

    scales = [scalar(scale), scalar(scale)]
    if op == "NVFP4Linear":
        return [x, *projection(i, k), scales[0]]
    if op == "NVFP4GatedMLP":
        return [x, *projection(2 * i, k), *projection(k, i), *scales]
    if op == "NVFP4PersistentMLP":
        stacked = [value.reshape(1) for value in scales]
        return [x, torch.ones(1, k, dtype=dtype), *projection(i, k, 1), *projection(k, i, 1), *stacked]
    experts = [*projection(2 * i, k, 3), *projection(k, i, 3), *projection(2 * i, k), *projection(k, i)]
    routing = [router_logits(rng, m, 3), torch.zeros(3)]
    return [x, *routing, *experts, random_t(rng, (k,), dtype), *scales]


def attributes_of(op: str, channels: int, scale_search: int, scale: float) -> dict[str, int | float]:
    own: dict[str, dict[str, int | float]] = {
        "NVFP4PersistentMLP": {"gated": 0, "norm": 0, "residual": 1, "activation": 4},
        "NVFP4MoE": {"top_k": 2, "shared": 1},
    }
    common = {"quantize_activations": 1, "scale_search": scale_search, "residual_channels": channels}
    return {**common, "static_scales": int(scale != 0), **own.get(op, {})}


@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize(("m", "scale_search", "scale"), [(3, 0, 0.0), (130, 2, 0.05), (7, 1, 0.05)])
def test_against_the_reference(host: PluginHost, seed: int, op: str, m: int, scale_search: int, scale: float) -> None:
    check(host, seed, op, m, scale_search, scale, GENERIC)


def check(host: PluginHost, seed: int, op: str, m: int, scale_search: int, scale: float, tactic: int) -> None:
    """The reference's values, but for sums that round differently and meet a rounding boundary of NVFP4."""
    dtype = torch.float16
    inputs = inputs_of(op, np.random.default_rng(seed), m, 96, 160, dtype, CHANNELS, scale)
    attributes = attributes_of(op, CHANNELS, scale_search, scale)
    (y,) = run(host, op, inputs, attributes, tactic, again=m < 100)
    expected = OPS[op].reference(*inputs, **attributes)
    assert isinstance(expected, torch.Tensor)
    error = (y.cpu().float() - expected.float()).abs()
    bound = 4 * torch.finfo(dtype).eps * expected.float().abs() + 1e-3 * expected.float().abs().mean()
    assert (error <= bound).float().mean() > (0.999 if op == "NVFP4Linear" else 0.9)
    assert error.norm() <= 0.03 * expected.float().norm()
