"""W4A4 products of FLUX.1's and Wan's blocks at their real widths on the emulator, bit by bit.

Scales of inputs and weights are powers of two, and values multiples of E2M1's smallest: float32 has every sum exactly,
in any order.
"""

import numpy as np
import pytest
import torch
from certain_codes import certain_values
from nvfp4_reference import Array, pack, quantize, tile
from op_inputs import float64
from test_kernels import run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True),
]
W4A4, TOKENS = 3, 5
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_ONE = 0x38  # E4M3; a power of two up is 8 more
INPUT_SCALE, HIDDEN_SCALE = 2.0**-6, 2.0**-8


def inputs(rng: np.random.Generator, k: int) -> torch.Tensor:
    """bfloat16 [TOKENS, k], which NVFP4 under INPUT_SCALE has exactly: 6 is in every block, times a power of two."""
    values = rng.choice(_E2M1, (TOKENS, k // 16, 16))
    values[..., 3] = 6
    return torch.from_numpy((values * 2.0 ** rng.integers(-1, 2, (TOKENS, k // 16, 1))).reshape(TOKENS, k)).bfloat16()


def weight(codes: Array, rng: np.random.Generator, scale: float) -> tuple[list[torch.Tensor], Array]:
    """The op's tensors for codes [n, k] with block scales of 1/2, 1 or 2, and the values that they stand for."""
    powers = rng.integers(-1, 2, (len(codes), codes.shape[1] // 16))
    block_scales = tile((_ONE + 8 * powers).astype(np.uint8))
    tensors = [torch.from_numpy(part).view(torch.int8) for part in (pack(codes.astype(np.uint8)), block_scales)]
    return [*tensors, torch.tensor(scale)], _E2M1[codes] * np.repeat(2.0**powers, 16, axis=1) * scale


def tensor_core_launches(gpu: Gpu) -> int:
    return sum("W4A4Kernel" in launch.kernel for launch in gpu.launches)


@pytest.mark.parametrize(
    ("k", "n"),
    [
        pytest.param(3072, 3072, id="FLUX.1's q, k, v, output"),
        pytest.param(3072 + 12288, 3072, id="FLUX.1's output of a single block"),
        pytest.param(5120, 5120, id="Wan 14B's q, k, v, output"),
    ],
)
def test_linear(emulated: PluginHost, emulated_gpu: Gpu, rng: np.random.Generator, k: int, n: int) -> None:
    x = inputs(rng, k)
    tensors, values = weight(rng.integers(0, 16, (n, k)), rng, 2.0**-8)
    bias = torch.from_numpy(rng.integers(-64, 65, n) / 16).bfloat16()
    emulated_gpu.launches.clear()
    given = [x[None], *tensors, bias, torch.tensor(INPUT_SCALE)]
    (y,) = run(emulated, "NVFP4Linear", given, {"quantize_activations": 1}, W4A4, again=False)
    assert tensor_core_launches(emulated_gpu) == 1
    assert torch.equal(y[0].cpu(), torch.from_numpy(float64(x) @ values.T + float64(bias)).bfloat16())


@pytest.mark.parametrize(
    ("k", "i"), [pytest.param(3072, 12288, id="FLUX.1's"), pytest.param(1536, 8960, id="Wan 1.3B's")]
)
def test_mlp(emulated: PluginHost, emulated_gpu: Gpu, rng: np.random.Generator, k: int, i: int) -> None:
    """An output reads one block of hidden values, and is equal where GELU's last bits cannot change their codes."""
    x = inputs(rng, k)
    up, up_values = weight(rng.integers(0, 16, (i, k)), rng, 2.0**-9)
    codes = rng.integers(0, 16, (k, i // 16, 16))
    block = np.arange(k) * (i // 16) // k
    codes[np.arange(i // 16) != block[:, None]] = 0
    down, down_values = weight(codes.reshape(k, i), rng, 2.0**-4)
    up_bias = torch.from_numpy(rng.integers(-16, 17, i) / 16).bfloat16()
    layers = [tensor[None] for tensor in (*up, up_bias, *down, torch.zeros(k).bfloat16())]
    scales = [torch.tensor([INPUT_SCALE]), torch.tensor([HIDDEN_SCALE])]
    attributes = {"activation": int(Activation.GELU_TANH), "gated": 0, "norm": 0, "residual": 0}
    attributes |= {"quantize_activations": 1, "static_scales": 1}
    emulated_gpu.launches.clear()
    given = [x, torch.ones(1, k).bfloat16(), *layers, *scales]
    (y,) = run(emulated, "NVFP4PersistentMLP", given, attributes, W4A4, again=False)
    assert tensor_core_launches(emulated_gpu) == 2
    sums = torch.from_numpy(float64(x) @ up_values.T + float64(up_bias))
    hidden = torch.nn.functional.gelu(sums, approximate="tanh").numpy()
    assert np.array_equal(quantize(x.float().numpy(), INPUT_SCALE).values, float64(x))
    found, certain = certain_values(hidden, 4e-6 * np.abs(hidden) + 1e-7, HIDDEN_SCALE, 0)
    settled = certain.reshape(TOKENS, -1, 16).all(-1)[:, block]
    assert settled.mean() > 0.9
    assert torch.equal(y.cpu()[settled], torch.from_numpy(found @ down_values.T).bfloat16()[settled])
