"""Every op on the GPU, through the plugin's whole life in the plugin host, against float64."""

from collections.abc import Mapping

import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import (
    Array,
    activate,
    gated_activate,
    pack,
    quantize,
    quantize_with_residual,
    rmsnorm,
    rounded,
    tile,
)
from op_inputs import float64

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GENERIC = 1
W4A16_MMA_SYNC, W4A16_SM90 = 6, 8
FP8_GPUS = {"FP8GatedMLP": ((8, 9), (9, 0), (12, 0), (12, 1)), "FP8MoE": ((9, 0),)}


def require_gpu_of(tactic: int) -> None:
    """Skips where a tactic does not exist; without a GPU, an emulated one has it."""
    if tactic == W4A16_SM90 and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"tactic {tactic} is SM90's alone")


def require_streaming(host: PluginHost, inputs: list[torch.Tensor], tactic: int) -> None:
    """Skips where tactic W4A16_MMA_SYNC does not serve a linear, because W4A16 is by the same kernels."""
    if tactic != W4A16_MMA_SYNC:
        return
    with host.session("NVFP4Linear", inputs, {}) as session:
        if tactic not in session.tactics:
            pytest.skip("by the same kernels as tactic W4A16")


def require_fp8_tensor_cores(op: str) -> None:
    """Skips where an FP8 op has generic kernels alone."""
    if torch.cuda.get_device_capability() not in FP8_GPUS[op]:
        served = ", ".join(f"SM{major}{minor}" for major, minor in FP8_GPUS[op])
        pytest.skip(f"{op}'s tensor-core kernels are for {served}")


def run(
    host: PluginHost,
    op: str,
    inputs: list[torch.Tensor],
    attributes: Mapping[str, int | float],
    tactic: int = GENERIC,
    *,
    again: bool = True,
) -> list[torch.Tensor]:
    """One op twice: a second run, in other memory, must give the same bits."""
    inputs = [x.cuda() for x in inputs]
    with host.session(op, inputs, attributes, tactic=tactic) as session:
        first = session.run(inputs)
        if not again:
            return first
        second = session.run(inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), "not deterministic"
    return first


def quantized(x: Array, scale: float = 0.0) -> Array:
    return quantize(x.astype(np.float32), scale).values


def assert_close(y: torch.Tensor, reference: Array, bound: Array, norm: float) -> None:
    """Each element within `bound`, the whole within `norm` of the reference's norm; both beside T's own rounding."""
    epsilon = torch.finfo(y.dtype).eps
    error = np.abs(float64(y) - reference)
    assert np.isfinite(error).all(), "NaN or Inf"
    assert (error <= epsilon * np.abs(reference) + bound).all(), f"max error {error.max()}"
    if reference.size >= 100:  # of few elements, one that cancels decides
        assert np.linalg.norm(error) <= (epsilon + norm) * np.linalg.norm(reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 16), (1, 1, 16), (3, 77, 48), (65, 129, 144), (130, 300, 1040)])
@pytest.mark.parametrize("activation", range(7))
def test_linear(
    host: PluginHost, seed: int, m: int, n: int, k: int, dtype: torch.dtype, w4a4: int, activation: int
) -> None:
    rng = np.random.default_rng(seed)
    scale = float(rng.choice([0.0, 0.004]))
    case = op_inputs.linear(rng, m, n, k, dtype, scale)
    (y,) = run(host, "NVFP4Linear", case.inputs, {"activation": activation, "quantize_activations": w4a4})
    x, w, bias = float64(case.inputs[0])[0], case.weights[0].values, float64(case.inputs[4])
    if w4a4:
        x = quantized(x, scale)
    pre = x @ w.T + bias
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(bias)
    slope = 1 + 2 * np.abs(pre) if activation == 2 else 1.2
    assert y.shape == (1, m, n)
    assert_close(y[0], activate(pre, activation), k**0.5 * 1e-6 * magnitude * slope, 1e-5)


def mlp(
    x: Array,
    up: tuple[Array, Array],
    down: tuple[Array, Array],
    attributes: Mapping[str, int | float],
    dtype: torch.dtype,
    gated: int = 1,
) -> tuple[Array, Array]:
    """One MLP in float64, its hidden values through T or NVFP4; and the sum of the magnitudes that make it up."""
    if attributes["quantize_activations"]:
        x = quantized(x)
    pre = x @ up[0].T + up[1]
    activation = int(attributes["activation"])
    if gated:
        hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, attributes["alpha"], attributes["limit"])
    else:
        hidden = activate(pre, activation)
    hidden = quantized(hidden) if attributes["quantize_activations"] else rounded(hidden, dtype)
    magnitude = np.abs(hidden) @ np.abs(down[0]).T + np.abs(down[1])
    return hidden @ down[0].T + down[1], magnitude


def check_mlp(y: torch.Tensor, reference: Array, magnitude: Array, w4a4: int, norm: float = 1e-5) -> None:
    """A hidden value on a rounding boundary may fall on its other side: one step of T, or (rarely) of NVFP4. `norm`:
    what sums, without quantized activations, may lose of the whole."""
    epsilon = torch.finfo(y.dtype).eps
    bound = np.full_like(magnitude, 0.3 * magnitude.max(initial=0)) if w4a4 else (4 * epsilon + 1e-5) * magnitude
    assert_close(y, reference, bound, 0.02 if w4a4 else norm)
    if reference.size:
        assert np.median(np.abs(float64(y) - reference) / magnitude) <= 2 * epsilon + 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize(("m", "k", "i", "h"), [(0, 16, 16, 3), (1, 16, 16, 1), (5, 48, 80, 77), (67, 272, 144, 129)])
@pytest.mark.parametrize("activation", [3, 5, 7, 8])
def test_gated_mlp(
    host: PluginHost, seed: int, m: int, k: int, i: int, h: int, dtype: torch.dtype, w4a4: int, activation: int
) -> None:
    case = op_inputs.gated_mlp(np.random.default_rng(seed), m, k, i, h, dtype)
    attributes = {"activation": activation, "quantize_activations": w4a4, "alpha": 1.5, "limit": 2.0}
    (y,) = run(host, "NVFP4GatedMLP", case.inputs, attributes)
    x, up_bias, down_bias = (float64(case.inputs[j]) for j in (0, 4, 8))
    up, down = case.weights
    check_mlp(y, *mlp(x, (up.values, up_bias), (down.values, down_bias), attributes, dtype), w4a4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize(("norm", "residual"), [(0, 0), (1, 1), (0, 1)])
def test_one_persistent_layer(
    host: PluginHost, seed: int, dtype: torch.dtype, w4a4: int, gated: int, norm: int, residual: int
) -> None:
    k, i = 112, 80
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, 19, k, i, k, dtype, gated=gated)
    attributes = {"activation": 3, "gated": gated, "norm": norm, "residual": residual, "epsilon": 1e-5}
    attributes |= {"quantize_activations": w4a4, "alpha": 1.702, "limit": 7.0}
    (y,) = run(host, "NVFP4PersistentMLP", case.inputs, attributes)
    x, weight, up_bias, down_bias = (float64(case.inputs[j]) for j in (0, 1, 5, 9))
    up, down = case.weights
    n = rounded(rmsnorm(x, weight[0], 1e-5), dtype) if norm else x
    m, magnitude = mlp(n, (up.values[0], up_bias[0]), (down.values[0], down_bias[0]), attributes, dtype, gated)
    check_mlp(y, m + residual * x, magnitude + np.abs(x), w4a4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w4a4", [0, 1])
def test_persistent_layers_chain(host: PluginHost, seed: int, dtype: torch.dtype, w4a4: int) -> None:
    """Three layers in one call give the bits of three calls."""
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 3, 9, 64, 48, 64, dtype, gated=1)
    attributes = {"activation": 5, "norm": 1, "residual": 1, "epsilon": 1e-6, "quantize_activations": w4a4}
    (whole,) = run(host, "NVFP4PersistentMLP", case.inputs, attributes)
    x = case.inputs[0]
    for layer in range(3):
        one = [x, *(tensor[layer : layer + 1] for tensor in case.inputs[1:])]
        (x,) = run(host, "NVFP4PersistentMLP", one, attributes)
    assert torch.equal(whole, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k"), [(0, 16), (1, 16), (7, 48), (129, 80), (257, 4112), (2, 32784), (5000, 48)])
@pytest.mark.parametrize(
    ("add_residual", "scale_search", "channels"),
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 2, 0), (1, 0, 64), (0, 1, 32), (0, 2, 16)],
)
def test_quantize_bits(
    host: PluginHost, seed: int, m: int, k: int, dtype: torch.dtype, add_residual: int, scale_search: int, channels: int
) -> None:
    rng = np.random.default_rng(seed)
    scale = float(rng.choice([0.0, 1e-3, 10.0]))
    check_quantize_bits(host, rng, m, k, dtype, scale, add_residual, scale_search, min(channels, k // 16 * 16))


def check_quantize_bits(
    host: PluginHost, rng: np.random.Generator, m: int, k: int, dtype: torch.dtype, scale: float,
    add_residual: int, scale_search: int, channels: int,
) -> None:  # fmt: skip
    """`scale` 0: found at run time."""
    case = op_inputs.quantize(rng, m, k, dtype, scale)
    # Zero blocks, subnormal block scales and saturation.
    # The last row has the largest value.
    powers = rng.integers(-7, 4, (m, 1))
    powers[-1:] = 4
    case.inputs[0] *= torch.from_numpy(10.0**powers).to(dtype)
    case.inputs[0][:, : k // 3] = 0
    attributes = {"add_residual": add_residual, "scale_search": scale_search, "residual_channels": channels}
    packed, scales, tensor_scale, r = run(host, "NVFP4Quantize", case.inputs, attributes)
    expected_r = case.inputs[0]
    if add_residual:
        expected_r = (expected_r.float() + case.inputs[1].float()).to(dtype)
    assert torch.equal(r.cpu(), expected_r)
    reference = quantize_with_residual(expected_r.float().numpy(), scale, scale_search, channels)
    assert tensor_scale.shape == ()
    assert tensor_scale.item() == reference.tensor_scale
    np.testing.assert_array_equal(scales.cpu().numpy().view(np.uint8), tile(reference.block_scales))
    np.testing.assert_array_equal(packed.cpu().numpy().view(np.uint8), pack(reference.codes))


@pytest.mark.parametrize("channels", [0, 32])
@pytest.mark.parametrize("scale_search", [0, 1, 2])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_quantize_bits_of_nan_and_infinity(
    host: PluginHost, seed: int, scale_search: int, scale: float, channels: int
) -> None:
    """As the Torch reference, which the ONNX body equals."""
    case = op_inputs.quantize(np.random.default_rng(seed), 7, 48, torch.bfloat16, scale)
    case.inputs[0][1, 5], case.inputs[0][2, 20], case.inputs[0][3, 40] = torch.nan, torch.inf, -torch.inf
    attributes = {"scale_search": scale_search, "residual_channels": channels}
    expected = OPS["NVFP4Quantize"].reference(*case.inputs, **attributes)
    outputs = [output.cpu() for output in run(host, "NVFP4Quantize", case.inputs, attributes)]
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if number == 1:  # block scales: a NaN may have any sign
            found, wanted = (scales.view(torch.float8_e4m3fn).float().abs() for scales in (found, wanted))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [130])
def test_quantize_after_norm(host: PluginHost, seed: int, dtype: torch.dtype, m: int) -> None:
    case = op_inputs.quantize(np.random.default_rng(seed), m, 272, dtype)
    for x in case.inputs[:2]:
        x[0] *= 2.0**-9  # where epsilon counts
    attributes = {"norm": 1, "add_residual": 1, "epsilon": 1e-5}
    packed, scales, tensor_scale, r = run(host, "NVFP4Quantize", case.inputs, attributes)
    n = rmsnorm(float64(r), float64(case.inputs[2]), 1e-5)
    reference = quantize(rounded(n, dtype).astype(np.float32))
    # n may round to T's other neighbour, which moves few codes.
    assert abs(tensor_scale.item() / reference.tensor_scale - 1) <= 2 * torch.finfo(dtype).eps
    assert (packed.cpu().numpy().view(np.uint8) != pack(reference.codes)).mean() < 0.02
    assert (scales.cpu().numpy().view(np.uint8) != tile(reference.block_scales)).mean() < 0.02


@pytest.mark.parametrize("w4a4", [0, 1])
def test_nan_reaches_the_output(host: PluginHost, seed: int, w4a4: int) -> None:
    case = op_inputs.linear(np.random.default_rng(seed), 4, 8, 32, torch.float16)
    case.inputs[0][0, 2, 5] = float("nan")
    (y,) = run(host, "NVFP4Linear", case.inputs, {"quantize_activations": w4a4})
    assert y[0, 2].isnan().all()


def test_shape_change_within_a_profile(host: PluginHost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    largest = op_inputs.linear(rng, 100, 40, 64, torch.float16)
    weights = [x.cuda() for x in largest.inputs[1:]]
    session_inputs = [largest.inputs[0][:, :3].cuda(), *weights]
    attributes = {"quantize_activations": 1}
    with host.session("NVFP4Linear", session_inputs, attributes, max_inputs=[largest.inputs[0].cuda(), *weights]) as s:
        for m in (100, 1, 33):
            inputs = [largest.inputs[0][:, :m].cuda(), *weights]
            (y,) = s.run(inputs)
            (alone,) = run(host, "NVFP4Linear", inputs, attributes)
            assert torch.equal(y, alone)


def test_unknown_tactic_is_refused(host: PluginHost, seed: int) -> None:
    case = op_inputs.linear(np.random.default_rng(seed), 2, 16, 16, torch.float32)
    inputs = [x.cuda() for x in case.inputs]
    with host.session("NVFP4Linear", inputs, tactic=999) as session, pytest.raises(HostError, match="tactic 999"):
        session.run(inputs)


def test_cuda_graph(host: PluginHost, seed: int) -> None:
    """Launches allocate nothing and stay on the stream, so a graph replays them on new inputs."""
    case = op_inputs.gated_mlp(np.random.default_rng(seed), 6, 64, 48, 40, torch.bfloat16)
    inputs = [x.cuda() for x in case.inputs]
    with host.session("NVFP4GatedMLP", inputs, {"quantize_activations": 1}) as session:
        y = torch.empty(6, 40, dtype=torch.bfloat16, device="cuda")
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        session.run(inputs)  # loads the kernels: not during a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            session.enqueue(inputs, [y], workspace)
        inputs[0].mul_(3.0)
        graph.replay()
        assert torch.equal(y, session.run(inputs)[0])
