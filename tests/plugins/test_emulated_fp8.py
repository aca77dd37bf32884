"""FP8GatedMLP on tensor cores, by wgmma and by mma.sync, from enqueue down to its PTX, on the emulator."""

import re

import numpy as np
import op_inputs
import pytest
import torch
from test_fp8 import AUTO, FP8, INPUT_SCALE, assert_close, expected
from test_kernels import run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = pytest.mark.slow
on_both = pytest.mark.parametrize("emulated_gpu", ["h200", "rtx-blackwell"], indirect=True)


def gemms(gpu: Gpu) -> int:
    """Tensor-core GEMMs launched so far; forgets them."""
    found = sum("Fp8Kernel" in launch.kernel or "fp8_gemm" in launch.kernel for launch in gpu.launches)
    gpu.launches.clear()
    return found


@on_both
@pytest.mark.parametrize(
    ("m", "k", "i", "h", "dtype", "activation", "given"),
    [
        (5, 48, 80, 72, torch.float16, Activation.SILU, False),
        (131, 272, 144, 136, torch.bfloat16, Activation.GELU_TANH, True),
    ],
    ids=["few rows, scales found", "tiles that end inside"],
)
def test_against_float64(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    k: int,
    i: int,
    h: int,
    dtype: torch.dtype,
    activation: Activation,
    given: bool,
) -> None:
    scales = (INPUT_SCALE, 4 / 448) if given else (0.0, 0.0)
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), m, k, i, h, dtype, scales)
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
    gemms(emulated_gpu)
    (y,) = run(emulated, "FP8GatedMLP", case.inputs, attributes | {"static_scales": int(given)}, FP8)
    assert gemms(emulated_gpu) == (4 if given else 6)  # run() calls twice; an unknown scale costs a GEMM
    # Sums that round differently and meet a rounding boundary of E4M3.
    assert_close(y, expected(case, **attributes), 3e-3)


@pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)
def test_tiles_by_tokens(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Rows and columns of a tile and of a cluster, of both GEMMs: few rows beyond the last token, and no cluster whose
    second tile has none."""
    rng = np.random.default_rng(seed)
    attributes = {"activation": int(Activation.SILU), "alpha": 1.5, "limit": 2.0}

    def tiles(m: int, h: int = 24) -> list[tuple[int, ...]]:
        case = op_inputs.fp8_gated_mlp(rng, m, 32, 48, h, torch.float16, (INPUT_SCALE, 4 / 448))
        emulated_gpu.launches.clear()
        (y,) = run(emulated, "FP8GatedMLP", case.inputs, attributes | {"static_scales": 1}, FP8)
        assert_close(y, expected(case, **attributes), 3e-3)
        found = (
            re.search(r"ConfigILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", launch.kernel) for launch in emulated_gpu.launches
        )
        return list(dict.fromkeys(tuple(map(int, match.groups())) for match in found if match))

    small = (64, 64, 1, 1)
    assert tiles(64) == [(64, 128, 1, 1), small]
    assert tiles(65) == [(64, 128, 2, 1), small]
    assert tiles(129) == [(64, 128, 1, 1), small]
    assert tiles(200) == [(128, 128, 2, 1), small]
    assert tiles(260) == [(128, 128, 1, 2), small]
    assert tiles(130, 2880) == [(64, 128, 1, 1)]


@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize(("m", "activation"), [(3, Activation.SWIGLU_CLAMPED), (70, Activation.SILU_CLAMPED)])
def test_split_k(emulated: PluginHost, seed: int, m: int, activation: Activation) -> None:
    """Few tiles of the down GEMM: the last split to arrive adds all up. On Hopper only a K that takes an emulator too
    long is split; see test_fp8.py."""
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), m, 64, 512, 40, torch.float16, (INPUT_SCALE, 4 / 448))
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
    (y,) = run(emulated, "FP8GatedMLP", case.inputs, attributes, AUTO)
    assert_close(y, expected(case, **attributes), 3e-3)


@on_both
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU_QUICK])
def test_gates_far_from_zero(emulated: PluginHost, seed: int, activation: Activation) -> None:
    """The square of such a gate is more than float32 holds."""
    generator = np.random.default_rng(seed)
    size = 1e20
    case = op_inputs.fp8_gated_mlp(generator, 5, 48, 80, 72, torch.bfloat16, (INPUT_SCALE, 4 * size / 448))
    case.inputs[3][0::2] = torch.from_numpy(generator.choice([-size, size], 80)).to(torch.bfloat16)
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
    (y,) = run(emulated, "FP8GatedMLP", case.inputs, attributes | {"static_scales": 1}, FP8)
    assert_close(y, expected(case, **attributes), 3e-3)
