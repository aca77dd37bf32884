"""The W4A16 kernel for small linears on the PTX emulator: codes and block scales converted by instructions (Blackwell),
one of them (SM90) and neither (SM80); x read by clusters of two (B200, SM90) and not."""

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
    check(emulated, emulated_gpu, m, n, k, dtype, seed)
    assert not emulated_gpu.launches[-1].cluster


@pytest.mark.parametrize("emulated_gpu", ["b200", "h200"], indirect=True)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (5, 70, 4128, torch.float16),
        (7, 10, 2592, torch.bfloat16),
        (16, 40, 1568, torch.float16),
        (12, 130, 1536, torch.bfloat16),
    ],
    ids=["an odd number of chunks", "as FP16", "two columns", "both alike"],
)
def test_halves_of_k(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """By clusters of two."""
    check(emulated, emulated_gpu, m, n, k, dtype, seed)
    assert emulated_gpu.launches[-1].cluster == (2, 1, 1)


@pytest.mark.parametrize(
    ("emulated_gpu", "m", "k", "shared"),
    [("h200", 1, 6304, 140), ("a100", 2, 6432, 150), ("h200", 13, 6304, 228)],
    indirect=["emulated_gpu"],
)
def test_rings_smaller_than_their_chunks(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, k: int, shared: int
) -> None:
    """Three stages for a warp's four chunks, where an SM has `shared` KB."""
    emulated_gpu.resize(sm_count=6, shared_per_sm=shared * 1024)
    check(emulated, emulated_gpu, m, 100, k, torch.float16, seed)


def check(host: PluginHost, gpu: Gpu, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    inputs = op_inputs.linear(np.random.default_rng(seed), m, n, k, dtype).inputs
    attributes = {"activation": Activation.SILU}
    with host.session("NVFP4Linear", inputs, attributes) as session:
        (y,) = session.run(inputs)
    assert "sm80_w4a16_small" in gpu.launches[-1].kernel
    reference = OPS["NVFP4Linear"].reference(*inputs, **attributes)
    assert isinstance(reference, torch.Tensor)
    assert torch.linalg.norm((y - reference).float()) < TOLERANCE[dtype] * torch.linalg.norm(reference.float())
