"""NVFP4MoE in W4A4 on Blackwell's tensor cores, from enqueue down to its PTX, on the emulator: skewed routing, empty
experts, partial tiles in every direction, against float64 and the generic kernels."""

from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import activate, gated_activate, quantize
from op_inputs import float64
from test_emulated_w4a4 import BOTH_FAMILIES, ONE_FAMILY, check_hidden, identity_down, spread
from test_kernels import GENERIC, run
from test_moe import DEEPSEEK, check

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = pytest.mark.slow
ONE_GPU = pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
AUTO, W4A4, W4A4_PAIR = 0, 3, 4


def gemm_launches(gpu: Gpu) -> int:
    """Launches of the experts' GEMMs so far; forgets them."""
    found = sum("ExpertsKernel" in launch.kernel for launch in gpu.launches)
    gpu.launches.clear()
    return found


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("m", "h", "i", "experts", "attributes"),
    [
        (5, 96, 96, 8, {**DEEPSEEK, "scaling_factor": 2.5, "shared": 1}),
        # More experts than a stripe of the scheduler has, and two tiles of columns.
        (6, 160, 64, 16, {"top_k": 3, "activation": 7, "shared": 1, "shared_gated": 1, "scoring": 4}),
        (7, 64, 96, 4, {"top_k": 2, "scoring": 3, "scale_input": 1, "gated": 0, "activation": 4, "shared": 1}),
    ],
)
def test_experts(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, h: int, i: int, experts: int, attributes: dict[str, Any]
) -> None:
    case = op_inputs.moe(
        np.random.default_rng(seed), m, h, i, experts, torch.bfloat16, gated=attributes.get("gated", 1), s=96
    )
    gemm_launches(emulated_gpu)
    check(emulated, case, {"quantize_activations": 1, **attributes}, torch.bfloat16, W4A4)
    assert gemm_launches(emulated_gpu) == 6 * (1 + attributes.get("shared", 0))  # run() enqueues twice


@BOTH_FAMILIES
def test_skewed_routing(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """One expert takes all tokens, two take some and two none; fewer blocks than tiles, so that each takes several."""
    emulated_gpu.resize(sm_count=2)
    case = op_inputs.moe(np.random.default_rng(seed), 131, 96, 96, 5, torch.float16, s=160)
    case.inputs[2][:] = torch.tensor([0.0, -100, 100, 0, -100])
    attributes = {"top_k": 2, "scoring": 1, "shared": 1, "quantize_activations": 1}
    check(emulated, case, attributes, torch.float16, W4A4)


@BOTH_FAMILIES
@pytest.mark.parametrize(("gated", "hidden_scale", "scale_search"), [(0, 2.0**-7, 0), (1, 0.0, 2)])
def test_hidden_values(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, gated: int, hidden_scale: float, scale_search: int
) -> None:
    """Bit by bit, as the down GEMM reads them, through experts whose down projection is the identity."""
    m, i, activation = 131, 96, int(Activation.SILU)
    case = op_inputs.moe(np.random.default_rng(seed), m, i, i, 3, torch.float16, gated=gated)
    identity_down(case, i, 7)
    case.inputs[2][:] = torch.tensor([1.0, 1, -9])
    case.inputs[-1] = torch.tensor(hidden_scale)
    if not hidden_scale:  # what is made of a bias beyond the matrix would be the largest by far
        case.inputs[0] *= 2.0**-6
        case.inputs[6] *= 2.0**-6
    attributes = {"top_k": 1, "scoring": 2, "gated": gated, "activation": activation, "quantize_activations": 1}
    attributes["scale_search"] = scale_search
    (y,) = run(emulated, "NVFP4MoE", case.inputs, attributes, W4A4)
    chosen = (case.inputs[1] + case.inputs[2]).argmax(-1).numpy()
    x = quantize(float64(case.inputs[0]).astype(np.float32), 0, scale_search).values
    pre = np.einsum("mk,mnk->mn", x, case.weights[0].values[chosen]) + float64(case.inputs[6])[chosen]
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, 0, 0) if gated else activate(pre, activation)
    check_hidden(y, hidden, hidden_scale, scale_search)


@ONE_FAMILY
@pytest.mark.parametrize(
    ("m", "gated", "activation"), [*((64, 0, activation) for activation in range(1, 7)), (9, 1, 3)]
)
def test_small_blocks_beside_large(emulated: PluginHost, seed: int, m: int, gated: int, activation: int) -> None:
    """In many rows, so that the code of every column sees each part of its activation. More of gates:
    test_emulated_rounding.py."""
    i = 160
    rng = np.random.default_rng(seed)
    case = op_inputs.moe(rng, m, i, i, 2, torch.float16, gated=gated)
    identity_down(case, i, 7)
    case.inputs[2][:] = torch.tensor([9.0, -9])
    spread(case, 3, rng, bool(gated))
    search = activation % 3
    attributes = {"top_k": 1, "scoring": 2, "gated": gated, "activation": activation, "quantize_activations": 1}
    attributes["scale_search"] = search
    (y,) = run(emulated, "NVFP4MoE", case.inputs, attributes, W4A4, again=False)
    x = quantize(float64(case.inputs[0]).astype(np.float32), 0, search).values
    pre = x @ case.weights[0].values[0].T + float64(case.inputs[6])[0]
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, 0, 0) if gated else activate(pre, activation)
    check_hidden(y, hidden, 0.0, search)


@ONE_GPU
def test_static_scales(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Two GEMMs instead of three, the bits of the passes that look whether a scale is given, and the generic kernels'
    values but for sums that meet a rounding boundary."""
    case = op_inputs.moe(np.random.default_rng(seed), 6, 64, 96, 4, torch.float16, s=32)
    case.inputs[-2:] = torch.tensor(0.004), torch.tensor(0.01)
    attributes = {"top_k": 2, "shared": 1, "quantize_activations": 1}
    (generic,) = run(emulated, "NVFP4MoE", case.inputs, attributes, GENERIC)
    (expected,) = run(emulated, "NVFP4MoE", case.inputs, attributes, W4A4)
    gemm_launches(emulated_gpu)
    (y,) = run(emulated, "NVFP4MoE", case.inputs, attributes | {"static_scales": 1}, W4A4)
    assert gemm_launches(emulated_gpu) == 2 * 2 * 2
    assert torch.equal(y, expected)
    assert (y == generic).float().mean() > 0.9
    assert torch.linalg.norm((y - generic).float()) <= 0.05 * torch.linalg.norm(generic.float())


@ONE_GPU
def test_choice(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def enqueue(h: int, dtype: torch.dtype, tactic: int, w4a4: int = 1) -> int:
        gemm_launches(emulated_gpu)
        inputs = op_inputs.moe(rng, 2, h, 32, 3, dtype).inputs
        run(emulated, "NVFP4MoE", inputs, {"top_k": 2, "quantize_activations": w4a4}, tactic)
        return gemm_launches(emulated_gpu)

    assert enqueue(32, torch.float16, AUTO) == 6
    assert enqueue(32, torch.float16, AUTO, w4a4=0) == 0
    assert enqueue(48, torch.float16, AUTO) == 0
    assert enqueue(32, torch.float32, AUTO) == 0
    for h, tactic in ((48, W4A4), (32, W4A4_PAIR)):
        with pytest.raises(HostError, match=f"NVFP4MoE: tactic {tactic} cannot serve this call"):
            enqueue(h, torch.float16, tactic)
