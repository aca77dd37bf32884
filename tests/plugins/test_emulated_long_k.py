"""Main loops that go round: K of many tiles, several tiles for each CTA, on the emulator. And data that show what is
added up or taken for a maximum beyond the last token: biases that only real tokens cancel."""

import numpy as np
import op_inputs
import pytest
import test_fp8_moe
import test_moe
import torch
from nvfp4_reference import activate, gated_activate, quantize
from op_inputs import float64
from test_emulated_w4a4 import check_hidden, identity_down, tactics
from test_fp8 import FP8, assert_close, expected
from test_kernels import run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = pytest.mark.slow
W4A4 = 3
BLACKWELL = pytest.mark.parametrize("emulated_gpu", ["b200", "rtx-blackwell"], indirect=True)
SILU, RELU2 = int(Activation.SILU), int(Activation.RELU2)


@pytest.fixture(autouse=True)
def two_sms(emulated_gpu: Gpu) -> None:
    emulated_gpu.resize(sm_count=2)


def cancel(x: torch.Tensor, bias: torch.Tensor, first_column: np.ndarray, size: float) -> None:
    """The first input is `size` for every token, and the bias takes away what it contributes: a row of zeros beyond the
    last token sees the bias alone, many times what a token sees."""
    x *= 0.125
    x[..., 0] = size
    bias.copy_(torch.from_numpy(-first_column * size).to(bias.dtype))


@BLACKWELL
@pytest.mark.parametrize(
    ("k", "i", "gated"),
    [(2304, 160, False), (2304, 160, True), (64, 448, True)],
    ids=["plain, long K", "gated, long K", "gated, many tiles"],
)
def test_hidden_values(emulated: PluginHost, emulated_gpu: Gpu, seed: int, k: int, i: int, gated: bool) -> None:
    """Bit by bit, as the down GEMM reads them, with a tensor scale found at run time. Seven tiles for each CTA are more
    than a pipeline of accumulators or of cluster launch control has stages, twice."""
    m = 131
    rng = np.random.default_rng(seed)
    if gated:
        op, bias, first, activation = "NVFP4GatedMLP", 4, 5, SILU
        case = op_inputs.gated_mlp(rng, m, k, i, i, torch.float16)
        attributes = {"activation": activation, "alpha": 1.5, "limit": 2.0}
    else:
        op, bias, first, activation = "NVFP4PersistentMLP", 5, 6, RELU2
        case = op_inputs.persistent_mlp(rng, 1, m, k, i, i, torch.float16, gated=0)
        attributes = {"activation": activation, "gated": 0, "norm": 0, "residual": 0}
    identity_down(case, i, first)
    weight = case.weights[0].values.reshape(-1, k)
    cancel(case.inputs[0], case.inputs[bias].view(-1), weight[:, 0], 64.0)
    x = quantize(float64(case.inputs[0]).astype(np.float32)).values
    pre = x @ weight.T + float64(case.inputs[bias]).reshape(-1)
    seen = np.vstack([pre, float64(case.inputs[bias]).reshape(-1)])  # and by a row of zeros
    every = gated_activate(seen[:, 0::2], seen[:, 1::2], activation, 1.5, 2.0) if gated else activate(seen, activation)
    hidden = every[:m]
    assert np.abs(every[m]).max() > 2 * np.abs(hidden).max()
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, op, case.inputs, attributes | {"quantize_activations": 1}, tactic, again=False)
        check_hidden(y, hidden, 0.0, error_of_sums=2e-5)  # terms of 64, and as many as K


@BLACKWELL
def test_linear(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    m, n, k = 131, 264, 2304
    case = op_inputs.linear(np.random.default_rng(seed), m, n, k, torch.bfloat16)
    x = quantize(float64(case.inputs[0])[0].astype(np.float32)).values
    w, bias = case.weights[0].values, float64(case.inputs[4])
    reference, magnitude = x @ w.T + bias, np.abs(x) @ np.abs(w).T + np.abs(bias)
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, "NVFP4Linear", case.inputs, {"quantize_activations": 1}, tactic, again=False)
        error = np.abs(float64(y)[0] - reference)
        assert (error <= torch.finfo(torch.bfloat16).eps * np.abs(reference) + k**0.5 * 1.2e-6 * magnitude).all()


@BLACKWELL
def test_experts(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """One takes every token, another some, the third none; one block takes all tiles, so that each but the first finds
    the pipelines as the one before left them."""
    emulated_gpu.resize(sm_count=1)
    h = 2304
    case = op_inputs.moe(np.random.default_rng(seed), 70, h, 96, 3, torch.bfloat16, s=32)
    case.inputs[2][:] = torch.tensor([100.0, 0, -100])
    attributes = {"top_k": 1, "scoring": 1, "quantize_activations": 1}
    test_moe.check(emulated, case, attributes, torch.bfloat16, W4A4)


@pytest.mark.parametrize("emulated_gpu", ["h200", "rtx-blackwell"], indirect=True)
def test_fp8(emulated: PluginHost, seed: int) -> None:
    m, k, i, h = 131, 2304, 144, 72
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), m, k, i, h, torch.bfloat16)
    x, up, up_scale, up_bias = case.inputs[:4]
    first = up.view(torch.float8_e4m3fn)[:, 0].double() * up_scale.double()
    cancel(x, up_bias, first.numpy(), 64.0)
    attributes = {"activation": SILU, "alpha": 1.5, "limit": 2.0}
    (y,) = run(emulated, "FP8GatedMLP", case.inputs, attributes, FP8, again=False)
    assert_close(y, expected(case, **attributes), 3e-3)


@pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)
def test_fp8_experts(emulated: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 70, 2304, 80, 3, torch.float16, s=32)
    case.inputs[2][:] = torch.tensor([100.0, 0, -100])
    test_fp8_moe.check(emulated, case, {"top_k": 1, "scoring": 1}, FP8, 3e-3)
