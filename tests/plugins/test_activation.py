"""A gate or an up that is no number makes an output that is none: every activation of every kernel, on the GPU."""

import numpy as np
import op_inputs
import pytest
import torch
from op_inputs import Case
from test_kernels import GENERIC, require_fp8_tensor_cores, require_gpu_of, run

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation

pytestmark = pytest.mark.gpu

W4A16, W4A4, FP8, W4A16_SM90 = 2, 3, 5, 8


def case_of(op: str, rng: np.random.Generator, m: int, dtype: torch.dtype) -> Case:
    if op.endswith("MoE"):
        return {"NVFP4MoE": op_inputs.moe, "FP8MoE": op_inputs.fp8_moe}[op](rng, m, 32, 64, 3, dtype)
    return {"NVFP4GatedMLP": op_inputs.gated_mlp, "FP8GatedMLP": op_inputs.fp8_gated_mlp}[op](rng, m, 32, 64, 24, dtype)


def check_nan(
    host: PluginHost,
    seed: int,
    op: str,
    m: int,
    tactic: int,
    activation: Activation,
    dtype: torch.dtype = torch.float16,
    w4a4: int = 0,
) -> None:
    """By the bias of a gate and by that of an up; a mixture's experts all have it."""
    require_gpu_of(tactic)
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
    attributes |= {"top_k": 2} if op.endswith("MoE") else {}
    attributes |= {"quantize_activations": w4a4} if op.startswith("NVFP4") else {}
    at = [formal.name for formal in OPS[op].inputs].index("gate_up_bias")
    for gate_or_up in (0, 1):
        case = case_of(op, np.random.default_rng(seed), m, dtype)
        case.inputs[at][..., 10 + gate_or_up] = torch.nan
        reference = OPS[op].reference(*case.inputs, **attributes)
        assert isinstance(reference, torch.Tensor)
        assert reference.isnan().all()
        (y,) = run(host, op, case.inputs, attributes, tactic, again=False)
        assert y.isnan().all(), ("gate", "up")[gate_or_up]


EVERY_ACTIVATION = pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
MLP, MOE = "NVFP4GatedMLP", "NVFP4MoE"


@EVERY_ACTIVATION
@DTYPES
@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize("op", [MLP, MOE])
def test_generic(host: PluginHost, seed: int, op: str, w4a4: int, dtype: torch.dtype, activation: Activation) -> None:
    check_nan(host, seed, op, 3, GENERIC, activation, dtype, w4a4)


@EVERY_ACTIVATION
@DTYPES
@pytest.mark.parametrize("tactic", [W4A16, W4A16_SM90])
@pytest.mark.parametrize("op", [MLP, MOE])
def test_w4a16(host: PluginHost, seed: int, op: str, tactic: int, dtype: torch.dtype, activation: Activation) -> None:
    for m in (1, 3, 20):
        check_nan(host, seed, op, m, tactic, activation, dtype)


@EVERY_ACTIVATION
@pytest.mark.parametrize("op", ["FP8GatedMLP", "FP8MoE"])
@pytest.mark.parametrize("tactic", [GENERIC, FP8])
def test_fp8(host: PluginHost, seed: int, tactic: int, op: str, activation: Activation) -> None:
    if tactic == FP8:
        require_fp8_tensor_cores(op)
    check_nan(host, seed, op, 5, tactic, activation)
