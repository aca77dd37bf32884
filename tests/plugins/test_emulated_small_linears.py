"""The W4A16 kernel for small linears on the PTX emulator: codes and block scales converted by instructions (Blackwell),
one of them (SM90) and neither (SM80)."""

from __future__ import annotations

import numpy as np
import op_inputs
import pytest
import torch

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("emulated_gpu", ["h200", "rtx-blackwell", "a100"], indirect=True)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (1, 40, 2336, torch.float16),
        (1, 130, 96, torch.bfloat16),
        (3, 7, 2080, torch.bfloat16),
        (6, 33, 544, torch.float16),
        (11, 70, 1056, torch.bfloat16),
    ],
    ids=["two stages, K ends in a chunk", "two groups of rows", "places for three tokens", "columns", "two columns"],
)
def test_linear(emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    inputs = op_inputs.linear(np.random.default_rng(seed), m, n, k, dtype).inputs
    attributes = {"activation": Activation.SILU}
    with emulated.session("NVFP4Linear", inputs, attributes) as session:
        (y,) = session.run(inputs)
    assert "sm80_w4a16_small" in emulated_gpu.launches[-1].kernel
    reference = OPS["NVFP4Linear"].reference(*inputs, **attributes)
    assert isinstance(reference, torch.Tensor)
    assert torch.linalg.norm((y - reference).float()) < TOLERANCE[dtype] * torch.linalg.norm(reference.float())
