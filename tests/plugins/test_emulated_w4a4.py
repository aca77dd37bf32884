"""W4A4 on Blackwell's tensor cores, from enqueue down to its PTX, on the emulator: CUTLASS's main loops with our
epilogues, partial tiles in every direction, against float64 and the generic kernels."""

from __future__ import annotations

import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import activate, gated_activate, quantize
from op_inputs import Case, float64
from test_kernels import GENERIC, run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("emulated_gpu", ["b200", "b300", "thor", "rtx-blackwell", "spark"], indirect=True),
]
AUTO, W4A4, W4A4_PAIR = 0, 3, 4


def tactics(gpu: Gpu) -> list[int]:
    """Clusters of two CTAs are for B200 and B300."""
    return [W4A4, W4A4_PAIR] if gpu.target.capability[0] == 10 else [W4A4]


def gemm_launches(gpu: Gpu) -> list[tuple[int, int, int] | None]:
    """Cluster shapes of the tensor-core GEMMs launched so far; forgets them."""
    found = [launch.cluster for launch in gpu.launches if "W4A4Kernel" in launch.kernel]
    gpu.launches.clear()
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "activation", "scale"),
    [
        (1, 24, 32, torch.float16, 0, 0.0),
        (130, 136, 96, torch.bfloat16, 3, 0.004),
        (257, 77, 544, torch.float16, 2, 0.0),
    ],
)
def test_linear(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    activation: int,
    scale: float,
) -> None:
    case = op_inputs.linear(np.random.default_rng(seed), m, n, k, dtype, scale)
    attributes = {"activation": activation, "quantize_activations": 1}
    x = quantize(float64(case.inputs[0])[0].astype(np.float32), scale).values
    w, bias = case.weights[0].values, float64(case.inputs[4])
    expected = activate(x @ w.T + bias, activation)
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(bias)
    slope = 1 + 2 * np.abs(x @ w.T + bias) if activation == 2 else 1.2
    for tactic in tactics(emulated_gpu):
        gemm_launches(emulated_gpu)
        (y,) = run(emulated, "NVFP4Linear", case.inputs, attributes, tactic)
        assert gemm_launches(emulated_gpu) == [None if tactic == W4A4 else (2, 1, 1)] * 2
        error = np.abs(float64(y)[0] - expected)
        assert (error <= torch.finfo(dtype).eps * np.abs(expected) + k**0.5 * 1e-6 * magnitude * slope).all()


def identity_down(case: Case, i: int) -> None:
    """Makes the down projection the identity, so that y shows the hidden values as the GEMM reads them."""
    packed = np.zeros((i, i // 2), np.uint8)
    packed[np.arange(i), np.arange(i) // 2] = np.where(np.arange(i) % 2, 0x20, 0x02)  # E2M1's 1.0
    scales = np.zeros(tuple(case.inputs[6].shape), np.uint8)
    scales[:] = 0x38  # E4M3's 1.0
    case.inputs[5] = torch.from_numpy(packed).view(torch.int8)
    case.inputs[6] = torch.from_numpy(scales).view(torch.int8)
    case.inputs[7] = torch.tensor(1.0)
    case.inputs[8] = torch.zeros_like(case.inputs[8])


@pytest.mark.parametrize("hidden_scale", [0.0, 2.0**-7])
@pytest.mark.parametrize(("m", "k", "i", "activation"), [(5, 64, 32, 7), (131, 96, 160, 3)])
def test_hidden_values_of_a_gated_mlp(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    k: int,
    i: int,
    activation: int,
    hidden_scale: float,
) -> None:
    """NVFP4 bit by bit, except where the sum lies within float32's error of a rounding boundary."""
    case = op_inputs.gated_mlp(np.random.default_rng(seed), m, k, i, i, torch.float16)
    identity_down(case, i)
    case.inputs[-1] = torch.tensor(hidden_scale)
    attributes = {"activation": activation, "quantize_activations": 1, "alpha": 1.5, "limit": 2.0}
    x = quantize(float64(case.inputs[0]).astype(np.float32)).values
    pre = x @ case.weights[0].values.T + float64(case.inputs[4])
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, 1.5, 2.0)
    expected = quantize(hidden.astype(np.float32), hidden_scale).values
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, "NVFP4GatedMLP", case.inputs, attributes, tactic)
        error = np.abs(float64(y) - expected)
        close = error <= torch.finfo(torch.float16).eps * np.abs(expected) + 1e-7
        assert close.mean() > 0.995
        assert np.linalg.norm(error) <= 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("residual", [0, 1])
def test_layers_against_the_generic_kernels(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    residual: int,
) -> None:
    """But for sums that round differently and meet a rounding boundary of NVFP4."""
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 2, 6, 32, 32, 32, torch.bfloat16, gated=1)
    attributes = {"activation": 5, "norm": 1, "residual": residual, "epsilon": 1e-5, "quantize_activations": 1}
    (generic,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, GENERIC)
    (y,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, W4A4)
    assert (y == generic).float().mean() > 0.98
    assert torch.linalg.norm((y - generic).float()) <= 0.05 * torch.linalg.norm(generic.float())


def test_no_wide_intermediate(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """The gate-up GEMM writes packed E2M1, padded block scales and one tensor scale; nothing else."""
    m, i = 130, 96
    case = op_inputs.gated_mlp(np.random.default_rng(seed), m, 64, i, 24, torch.float16)
    case.inputs[-1] = torch.tensor(0.01)
    emulated_gpu.launches.clear()
    run(emulated, "NVFP4GatedMLP", case.inputs, {"activation": 3, "quantize_activations": 1}, W4A4)
    amax, gate_up, _ = [launch for launch in emulated_gpu.launches if "W4A4Kernel" in launch.kernel][:3]
    assert amax.counters is not None
    assert gate_up.counters is not None
    assert amax.counters.bytes_written["global"] == 0  # the scale is given
    assert gate_up.counters.bytes_written["global"] == m * i // 2 + 256 * 8 + 4


def test_choice(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    attributes = {"quantize_activations": 1}

    def chosen(m: int, k: int, dtype: torch.dtype) -> list[tuple[int, int, int] | None]:
        gemm_launches(emulated_gpu)
        inputs = op_inputs.linear(rng, m, 16, k, dtype).inputs
        run(emulated, "NVFP4Linear", inputs, attributes, AUTO)
        return gemm_launches(emulated_gpu)[::2]

    assert chosen(3, 32, torch.float16) == [None]
    assert chosen(129, 32, torch.bfloat16) == [(2, 1, 1) if len(tactics(emulated_gpu)) == 2 else None]
    assert chosen(3, 48, torch.float16) == []
    assert chosen(3, 32, torch.float32) == []
    for refused in {W4A4, W4A4_PAIR} - set(tactics(emulated_gpu)):
        with pytest.raises(HostError, match=f"tactic {refused} cannot serve"):
            run(emulated, "NVFP4Linear", op_inputs.linear(rng, 3, 16, 32, torch.float16).inputs, attributes, refused)
    with pytest.raises(HostError, match="tactic 3 cannot serve"):
        run(emulated, "NVFP4Linear", op_inputs.linear(rng, 3, 16, 48, torch.float16).inputs, attributes, W4A4)
