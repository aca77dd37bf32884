"""Launches whatever else the process does with the CUDA runtime, on the PTX emulator's: what comes before a launch is
looked at, not what the kernels compute."""

import ctypes

import numpy as np
import op_inputs
import pytest
import torch

from ptx_emulator.shim import Gpu, toolkit
from trt_nvfp4.plugins.host import PluginHost

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)]

INVALID_DEVICE = 101


@pytest.fixture(autouse=True)
def launches_alone(emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_gpu, "execute", False)


@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize(
    "op", ["NVFP4Linear", "NVFP4PersistentMLP", "NVFP4Quantize", "NVFP4MoE", "FP8GatedMLP", "FP8MoE"]
)
def test_an_error_of_the_callers_is_not_the_plugins(emulated: PluginHost, seed: int, op: str, w4a4: int) -> None:
    """An application may have tried something that failed, and gone on: the runtime keeps that as its last error."""
    rng, dtype = np.random.default_rng(seed), torch.float32
    inputs = {
        "NVFP4Linear": lambda: op_inputs.linear(rng, 3, 24, 32, dtype),
        "NVFP4PersistentMLP": lambda: op_inputs.persistent_mlp(rng, 2, 3, 32, 48, 32, dtype, gated=1),
        "NVFP4Quantize": lambda: op_inputs.quantize(rng, 3, 32784 if w4a4 else 32, dtype),
        "NVFP4MoE": lambda: op_inputs.moe(rng, 3, 32, 48, 4, dtype),
        "FP8GatedMLP": lambda: op_inputs.fp8_gated_mlp(rng, 3, 32, 48, 24, dtype),
        "FP8MoE": lambda: op_inputs.fp8_moe(rng, 3, 32, 48, 4, dtype),
    }[op]().inputs
    attributes = {"norm": w4a4} if op == "NVFP4Quantize" else {} if "FP8" in op else {"quantize_activations": w4a4}
    runtime = ctypes.CDLL(str(toolkit.build_runtime()))
    with emulated.session(op, inputs, attributes) as session:
        assert runtime.cudaSetDevice(7) == INVALID_DEVICE
        session.run(inputs)
    # The caller finds it, and the next test does not: CUTLASS's host code would take it for its launch's.
    assert runtime.cudaGetLastError() == INVALID_DEVICE


def test_shared_memory_is_the_kernels_not_a_launchs(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Contexts of an engine share its kernels: what one asks for must do for a launch by another thread between its
    asking and its launch. So all shapes ask for the same."""
    rng, dtype = np.random.default_rng(seed), torch.float16
    shapes = [(m, k, i) for m in (1, 7, 30) for k, i in ((32, 64), (2048, 96), (320, 1024))]
    cases = [("NVFP4Linear", op_inputs.linear(rng, m, i, k, dtype)) for m, k, i in shapes]
    cases += [("NVFP4GatedMLP", op_inputs.gated_mlp(rng, m, k, i, 64, dtype)) for m, k, i in shapes]
    cases += [("NVFP4MoE", op_inputs.moe(rng, m, k, i, 4, dtype)) for m, k, i in shapes]
    limits: dict[str, set[int]] = {}
    for op, case in cases:
        emulated_gpu.shared_limits.clear()
        with emulated.session(op, case.inputs) as session:
            session.run(case.inputs)
        for kernel, limit in emulated_gpu.shared_limits.items():
            limits.setdefault(kernel, set()).add(limit)
    assert len(limits) >= 8  # for one token, and by columns of them
    assert {kernel: found for kernel, found in limits.items() if len(found) > 1} == {}


@pytest.mark.parametrize("m", [1, 8])
def test_in_a_green_context(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that wait for each other are no more than its SMs, of which a launch on the whole GPU has more."""
    rng, dtype = np.random.default_rng(seed), torch.float16
    cases = {
        "NVFP4PersistentMLP": op_inputs.persistent_mlp(rng, 2, m, 256, 2048, 256, dtype, gated=1),
        "NVFP4MoE": op_inputs.moe(rng, m, 256, 512, 8, dtype),
    }
    for sms in (0, 12):
        monkeypatch.setattr(emulated_gpu, "green_sms", sms)
        emulated_gpu.launches.clear()
        for op, case in cases.items():
            with emulated.session(op, case.inputs) as session:
                session.run(case.inputs)
        kernels = ("sm80_w4a16_mlp", "sm80_w4a16_token", "sm80_w4a16_moe")
        grids = [each.grid[0] for each in emulated_gpu.launches if any(name in each.kernel for name in kernels)]
        assert len(grids) == 2
        assert all((grid > 12) == (sms == 0) for grid in grids)
