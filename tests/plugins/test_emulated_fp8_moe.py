"""FP8MoE on Hopper's tensor cores, from enqueue down to its PTX, on the emulator: skewed routing, empty experts,
partial tiles in every direction, against float64."""

from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from test_fp8 import AUTO, FP8
from test_fp8_moe import SCALES, check
from test_kernels import GENERIC, run
from test_moe import DEEPSEEK

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)]


def gemms(gpu: Gpu) -> int:
    """Launches of the experts' GEMMs so far; forgets them."""
    found = sum("ExpertsKernel" in launch.kernel for launch in gpu.launches)
    gpu.launches.clear()
    return found


@pytest.mark.parametrize(
    ("m", "h", "i", "experts", "given", "attributes"),
    [
        (5, 96, 160, 8, False, {**DEEPSEEK, "scaling_factor": 2.5, "shared": 1}),
        (9, 272, 80, 8, True, {"top_k": 3, "activation": 7, "shared": 1, "shared_gated": 1, "scoring": 4}),
        (7, 64, 144, 4, False, {"top_k": 2, "scoring": 3, "scale_input": 1, "activation": 5}),
    ],
    ids=["groups, scales found", "clamped, scales given", "weights scale the input"],
)
def test_against_float64(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    h: int,
    i: int,
    experts: int,
    given: bool,
    attributes: dict[str, Any],
) -> None:
    case = op_inputs.fp8_moe(
        np.random.default_rng(seed), m, h, i, experts, torch.bfloat16, SCALES if given else (0, 0), s=96
    )
    gemms(emulated_gpu)
    check(emulated, case, {"static_scales": int(given), **attributes}, FP8, 3e-3)
    # run() enqueues twice; an unknown scale costs a GEMM.
    assert gemms(emulated_gpu) == (4 if given else 6) * (1 + attributes.get("shared", 0))


@pytest.mark.parametrize("m", [131, 300])
def test_skewed_routing(emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int) -> None:
    """One expert takes all tokens, two take some and two none; fewer blocks than tiles, so that each takes several.
    Tiles of 64 and of 128 rows."""
    emulated_gpu.resize(sm_count=2)
    case = op_inputs.fp8_moe(np.random.default_rng(seed), m, 48, 80, 5, torch.float16, s=32)
    case.inputs[2][:] = torch.tensor([0.0, -100, 100, 0, -100])
    check(emulated, case, {"top_k": 2, "scoring": 1, "shared": 1}, FP8, 3e-3)


def test_static_scales(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Two GEMMs instead of three, and the bits of the passes that look whether a scale is given."""
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 6, 64, 96, 4, torch.float16, SCALES)
    gemms(emulated_gpu)
    (expected,) = run(emulated, "FP8MoE", case.inputs, {"top_k": 2}, FP8)
    assert gemms(emulated_gpu) == 6
    (y,) = run(emulated, "FP8MoE", case.inputs, {"top_k": 2, "static_scales": 1}, FP8)
    assert gemms(emulated_gpu) == 4
    assert torch.equal(y, expected)


def test_choice(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def enqueue(dtype: torch.dtype, tactic: int, gated: int = 1) -> int:
        gemms(emulated_gpu)
        inputs = op_inputs.fp8_moe(rng, 2, 48, 16, 3, dtype, gated=gated).inputs
        run(emulated, "FP8MoE", inputs, {"top_k": 2, "gated": gated}, tactic)
        return gemms(emulated_gpu)

    assert enqueue(torch.float16, AUTO) == 6
    assert enqueue(torch.float16, GENERIC) == 0
    assert enqueue(torch.float32, AUTO) == 0
    assert enqueue(torch.float16, AUTO, gated=0) == 0
    for dtype, gated in ((torch.float32, 1), (torch.float16, 0)):
        with pytest.raises(HostError, match="FP8MoE: tactic 5 cannot serve this call"):
            enqueue(dtype, FP8, gated)
