"""A gate or an up that is no number, on the PTX emulator, through activations that compare."""

import pytest
from test_activation import FP8, MLP, MOE, W4A4, W4A16, W4A16_SM90, check_nan
from test_kernels import GENERIC

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

COMPARING = [Activation.RELU, Activation.RELU2, Activation.SILU_CLAMPED]  # swiglu_clamped has the code of the last
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("activation", COMPARING, ids=lambda a: a.name)]


@pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)
@pytest.mark.parametrize(
    ("op", "tactic", "m"),
    [
        (MLP, GENERIC, 3),
        (MLP, W4A16, 1),
        (MLP, W4A16, 3),
        (MOE, W4A16, 3),
        (MLP, W4A16_SM90, 1),
        (MLP, W4A16_SM90, 3),
        (MOE, W4A16_SM90, 1),
        (MOE, W4A16_SM90, 3),
        ("FP8GatedMLP", FP8, 3),
    ],
)
def test_nan(emulated: PluginHost, seed: int, op: str, tactic: int, m: int, activation: Activation) -> None:
    check_nan(emulated, seed, op, m, tactic, activation)


@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize("op", [MLP, MOE])
def test_nan_in_w4a4(emulated: PluginHost, seed: int, op: str, activation: Activation) -> None:
    check_nan(emulated, seed, op, 3, W4A4, activation, w4a4=1)
