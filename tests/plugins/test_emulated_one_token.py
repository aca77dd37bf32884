"""The W4A16 kernel of one token on the PTX emulator: codes and block scales converted by instructions (Blackwell), one
of them (SM90) and neither (SM80)."""

from typing import Any

import numpy as np
import op_inputs
import pytest
import test_w4a16_ranges
import torch

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation

on = pytest.mark.parametrize
W4A16, W4A16_MMA_SYNC = 2, 6
pytestmark = [pytest.mark.slow, on("emulated_gpu", ["h200", "rtx-blackwell", "a100"], indirect=True)]


@on("kind", ["largest", "smallest", "outliers"])
def test_ends_of_the_range(emulated: PluginHost, seed: int, kind: str) -> None:
    test_w4a16_ranges.test_ends_of_the_range(emulated, seed, kind, "largest", 1, W4A16_MMA_SYNC, torch.float16)
    test_w4a16_ranges.test_ends_of_the_range(emulated, seed, kind, "any", 1, W4A16_MMA_SYNC, torch.bfloat16)


def test_nan_and_infinity_reach_their_token_s_output(emulated: PluginHost, seed: int) -> None:
    test_w4a16_ranges.test_nan_and_infinity_reach_their_token_s_output(
        emulated, seed, 1, W4A16_MMA_SYNC, torch.bfloat16
    )


@on(
    ("gpu", "gated"),
    [({}, 0), ({}, 1), ({"sm_count": 2}, 0), ({"sm_count": 4, "shared_per_sm": 44 * 1024}, 1)],
    ids=["plain", "gated", "blocks with several tasks", "panels of one chunk"],
)
def test_layers(emulated: PluginHost, emulated_gpu: Gpu, seed: int, gpu: dict[str, Any], gated: int) -> None:
    """Parts of K summed by other blocks than computed them, values handed from layer to layer."""
    emulated_gpu.resize(**gpu)
    rng = np.random.default_rng(seed)
    inputs = op_inputs.persistent_mlp(rng, 3, 1, 288, 1056, 288, torch.float16, gated=gated).inputs
    attributes = {"activation": Activation.GELU, "gated": gated, "norm": 1, "residual": 1}
    with emulated.session("NVFP4PersistentMLP", inputs, attributes, tactic=W4A16) as session:
        (y,) = session.run(inputs)
    assert "sm80_w4a16_token" in emulated_gpu.launches[-1].kernel
    reference = OPS["NVFP4PersistentMLP"].reference(*inputs, **attributes)
    assert isinstance(reference, torch.Tensor)
    assert torch.linalg.norm((y - reference).float()) < 5e-3 * torch.linalg.norm(reference.float())
