"""Residual channels on Blackwell's tensor cores, on the emulator: what the epilogue that writes hidden values adds to
them, bit by bit, and all ops against their Torch references."""

import numpy as np
import pytest
import torch
from nvfp4_reference import gated_activate, quantize_with_residual
from op_inputs import float64
from test_emulated_w4a4 import AUTO, BOTH_FAMILIES
from test_residual_kernels import OP_NAMES, attributes_of, check, inputs_of

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops.number_formats import dequantize_blocks, unpack, untile_scales

pytestmark = pytest.mark.slow


@BOTH_FAMILIES
@pytest.mark.parametrize("op", OP_NAMES)
def test_ops(emulated: PluginHost, emulated_gpu: Gpu, seed: int, op: str) -> None:
    check(emulated, seed, op, 3, 2, 0.05, AUTO)


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("m", "i", "channels", "scale_search"), [(131, 160, 64, 0), (5, 96, 32, 2), (3, 32, 32, 0), (4, 240, 16, 0)]
)
def test_hidden_values(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, i: int, channels: int, scale_search: int
) -> None:
    """Through a down projection that adds up each value and what NVFP4 loses of it; K = 240 + 16, whose last block of
    scales is padding no more."""
    k = 96 if channels == 32 else 64 if channels == 64 else 80
    inputs = inputs_of("NVFP4GatedMLP", np.random.default_rng(seed), m, k, i, torch.float16, channels, 0.05)
    stored = i + channels
    columns = np.zeros((i, stored), np.uint8)
    columns[np.arange(i), np.arange(i)] = 2  # E2M1's 1.0
    columns[np.arange(i - channels, i), np.arange(i, stored)] = 2
    scales = np.full((-(-i // 128) * 128, -(-stored // 64) * 4), 0x38, np.uint8)  # E4M3's 1.0
    inputs[5] = torch.from_numpy(columns[:, 0::2] | columns[:, 1::2] << 4).view(torch.int8)
    inputs[6] = torch.from_numpy(scales).view(torch.int8)
    inputs[7], inputs[8] = torch.tensor(1.0), torch.zeros(i, dtype=torch.float16)
    attributes = attributes_of("NVFP4GatedMLP", channels, scale_search, 0.05)
    with emulated.session("NVFP4GatedMLP", [tensor.cuda() for tensor in inputs], attributes, tactic=AUTO) as session:
        (y,) = session.run([tensor.cuda() for tensor in inputs])
    x = quantize_with_residual(float64(inputs[0]).astype(np.float32), 0.05, scale_search, channels).values
    blocks = untile_scales(inputs[2].view(torch.float8_e4m3fn), 2 * i, (k + channels) // 16)
    up = dequantize_blocks(unpack(inputs[1]), blocks, inputs[3]).double().numpy()
    pre = x @ up.T + float64(inputs[4])
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], 3, 0, 0).astype(np.float32)
    seen = quantize_with_residual(hidden, 0.05, scale_search, channels).values
    expected = seen[:, :i].copy()
    expected[:, -channels:] += seen[:, i:]
    error = np.abs(float64(y) - expected)
    close = error <= torch.finfo(torch.float16).eps * np.abs(expected) + 1e-6
    assert close.mean() > 0.98
    assert np.linalg.norm(error) <= 0.02 * np.linalg.norm(expected)
