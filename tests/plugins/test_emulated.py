"""The whole plugin library, from enqueue down to its PTX, on GPUs that are not here: tests of test_kernels.py on the
PTX emulator, at sizes that it can bear.
"""

import numpy as np
import pytest
import test_kernels
import test_moe
import torch

from trt_nvfp4.plugins.host import PluginHost

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 16), (3, 77, 48)])
@pytest.mark.parametrize("w4a4", [0, 1])
def test_linear(emulated: PluginHost, seed: int, m: int, n: int, k: int, w4a4: int) -> None:
    test_kernels.test_linear(emulated, seed, m, n, k, torch.float16, w4a4, 3)


def test_gated_mlp(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_gated_mlp(emulated, seed, 3, 32, 48, 17, torch.bfloat16, 1, 7)


def test_persistent_layers(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_one_persistent_layer(emulated, seed, torch.float16, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("add_residual", "scale_search", "channels"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 2, 0), (1, 0, 32), (0, 2, 16)]
)
def test_quantize_bits(emulated: PluginHost, seed: int, add_residual: int, scale_search: int, channels: int) -> None:
    test_kernels.test_quantize_bits(emulated, seed, 7, 48, torch.bfloat16, add_residual, scale_search, channels)


@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_quantize_bits_of_no_rows(emulated: PluginHost, seed: int) -> None:
    """The tensor scale of nothing, which is the one of zeros."""
    test_kernels.check_quantize_bits(emulated, np.random.default_rng(seed), 0, 16, torch.bfloat16, 0.0, 0, 0, 0)


@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_quantize_after_norm(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_quantize_after_norm(emulated, seed, torch.bfloat16, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_quantize_bits_of_many_rows(emulated: PluginHost, seed: int) -> None:
    """So many that rows share their largest values."""
    test_kernels.check_quantize_bits(emulated, np.random.default_rng(seed), 2060, 16, torch.bfloat16, 0.0, 0, 0, 0)


@pytest.mark.parametrize("scale_search", [1, 2])
def test_quantize_bits_of_nan_and_infinity(emulated: PluginHost, seed: int, scale_search: int) -> None:
    test_kernels.test_quantize_bits_of_nan_and_infinity(emulated, seed, scale_search, 1.0, 32)


def test_nan_reaches_the_output(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_nan_reaches_the_output(emulated, seed, 1)


# Without the instruction that converts from E2M1, and with it; else these kernels depend on the number of SMs alone.
BOTH_CONVERSIONS = pytest.mark.parametrize("emulated_gpu", ["h200", "rtx-blackwell"], indirect=True)


@BOTH_CONVERSIONS
@pytest.mark.parametrize("m", [3, 9, 13])  # jobs of 8 pairs, one and several, and of 32
def test_moe_w4a16(emulated: PluginHost, seed: int, m: int) -> None:
    test_moe.test_w4a16_shapes(emulated, seed, test_moe.W4A16, torch.bfloat16, m, 32, 32, 3, 1)


@BOTH_CONVERSIONS
def test_moe_generic(emulated: PluginHost, seed: int) -> None:
    test_moe.test_generic_types(emulated, seed, torch.float16, 1, test_moe.SCORINGS[2])


@BOTH_CONVERSIONS
@pytest.mark.parametrize("tactic", [test_moe.GENERIC, test_moe.W4A16])
def test_moe_of_fewer_given_experts(emulated: PluginHost, seed: int, tactic: int) -> None:
    test_moe.test_fewer_experts_given_than_chosen(emulated, seed, tactic)
