"""W4A4 on Blackwell's tensor cores, from enqueue down to its PTX, on the emulator: CUTLASS's main loops with our
epilogues, partial tiles in every direction, against float64 and the generic kernels."""

import ml_dtypes
import numpy as np
import op_inputs
import pytest
import torch
from certain_codes import certain_values
from nvfp4_reference import Array, activate, gated_activate, quantize, tile
from op_inputs import Case, float64
from test_kernels import GENERIC, run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost

pytestmark = pytest.mark.slow
EVERY_GPU = pytest.mark.parametrize("emulated_gpu", ["b200", "b300", "thor", "rtx-blackwell", "spark"], indirect=True)
# PTX of SM100, B300's too, and of SM120, Spark's too: b200 takes one-CTA tiles, which are Thor's, and pairs.
BOTH_FAMILIES = pytest.mark.parametrize("emulated_gpu", ["b200", "rtx-blackwell"], indirect=True)
AUTO, W4A4, W4A4_PAIR = 0, 3, 4
# Tokens from which a problem is emulated once, not twice: the same kernels show the same bits on fewer.
LARGE = 100


def tactics(gpu: Gpu) -> list[int]:
    """Clusters of two CTAs are for B200 and B300."""
    return [W4A4, W4A4_PAIR] if gpu.target.capability[0] == 10 else [W4A4]


def gemm_launches(gpu: Gpu) -> list[tuple[int, int, int] | None]:
    """Cluster shapes of the tensor-core GEMMs launched so far; forgets them."""
    found = [launch.cluster for launch in gpu.launches if "W4A4Kernel" in launch.kernel]
    gpu.launches.clear()
    return found


@BOTH_FAMILIES
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
        (y,) = run(emulated, "NVFP4Linear", case.inputs, attributes, tactic, again=m < LARGE)
        assert gemm_launches(emulated_gpu) == [None if tactic == W4A4 else (2, 1, 1)] * (2 if m < LARGE else 1)
        error = np.abs(float64(y)[0] - expected)
        assert (error <= torch.finfo(dtype).eps * np.abs(expected) + k**0.5 * 1e-6 * magnitude * slope).all()


@BOTH_FAMILIES
def test_no_tokens(emulated: PluginHost, seed: int) -> None:
    """With a K that would be cut into parts."""
    rng = np.random.default_rng(seed)
    attributes = {"quantize_activations": 1}
    linear = op_inputs.linear(rng, 0, 24, 2048, torch.float16)
    (y,) = run(emulated, "NVFP4Linear", linear.inputs, attributes, AUTO)
    assert y.shape == (1, 0, 24)
    mlp = op_inputs.gated_mlp(rng, 0, 32, 2048, 24, torch.float16)
    (y,) = run(emulated, "NVFP4GatedMLP", mlp.inputs, attributes, AUTO)
    assert y.shape == (0, 24)


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("m", "n", "k", "activation", "splits"), [(5, 136, 2048, 4, 4), (130, 77, 1152, 0, 2), (3, 40, 1056, 0, 1)]
)
def test_few_tiles_split_k(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, n: int, k: int, activation: int, splits: int
) -> None:
    """Into parts of whole scale tiles, not of the main loop's tiles."""
    case = op_inputs.linear(np.random.default_rng(seed), m, n, k, torch.bfloat16, 0.004)
    emulated_gpu.launches.clear()
    attributes = {"activation": activation, "quantize_activations": 1}
    (y,) = run(emulated, "NVFP4Linear", case.inputs, attributes, W4A4)
    reductions = [launch for launch in emulated_gpu.launches if "w4a4_reduce" in launch.kernel]
    assert len(reductions) == (2 if splits > 1 else 0)
    x = quantize(float64(case.inputs[0])[0].astype(np.float32), 0.004).values
    w, bias = case.weights[0].values, float64(case.inputs[4])
    expected = activate(x @ w.T + bias, activation)
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(bias)
    error = np.abs(float64(y)[0] - expected)
    assert (error <= torch.finfo(torch.bfloat16).eps * np.abs(expected) + k**0.5 * 1.2e-6 * magnitude).all()


def identity_down(case: Case, i: int, first: int) -> None:
    """Makes the down projection, from input `first` on, the identity, so that y shows the hidden values as the GEMM
    reads them."""
    packed = np.zeros((i, i // 2), np.uint8)
    packed[np.arange(i), np.arange(i) // 2] = np.where(np.arange(i) % 2, 0x20, 0x02)  # E2M1's 1.0
    for offset, value in enumerate((packed, np.full(case.inputs[first + 1].shape, 0x38, np.uint8))):  # E4M3's 1.0
        every = np.broadcast_to(value, case.inputs[first + offset].shape)  # of several layers or experts
        case.inputs[first + offset] = torch.from_numpy(every.copy()).view(torch.int8)
    case.inputs[first + 2] = torch.ones_like(case.inputs[first + 2])
    case.inputs[first + 3] = torch.zeros_like(case.inputs[first + 3])


def check_hidden(
    y: torch.Tensor, hidden: Array, scale: float, scale_search: int = 0, error_of_sums: float = 4e-7
) -> None:
    """NVFP4 bit by bit, except where the value lies within float32's error of where another code or scale begins; that
    of the sums is a share of all values' root mean square."""
    noise = 4e-6 * np.abs(hidden) + error_of_sums * np.sqrt((hidden**2).mean())
    expected, certain = certain_values(hidden, noise, scale, scale_search)
    assert certain.mean() > 0.75  # of six blocks, one may be uncertain
    error = np.abs(float64(y) - expected)
    close = error <= torch.finfo(torch.float16).eps * np.abs(expected) + 1e-7
    assert close[certain].all(), f"{(certain & ~close).sum()} of {close.size} values"
    assert np.linalg.norm(error) <= 0.02 * np.linalg.norm(expected)


def spread(case: Case, first: int, rng: np.random.Generator, gated: bool) -> None:
    """Of an up projection whose inputs begin at `first`: what is activated lies about -6 to 6, another in each row.
    Block b of columns, from 2 on and without gates from 4 on, is 4**(1 - b) times as large, by its up or else by the
    sum itself, so that scales go down to E4M3's subnormals. The largest hidden value of gates is one whose activation
    is neither 0 nor 1, so that the tensor's scale shows it."""
    case.inputs[0] *= 0.5
    bias = case.inputs[first + 3]
    columns = bias.shape[-1] // (2 if gated else 1)
    size = 4.0 ** -np.maximum(np.arange(columns) // 16 - 1, 0)
    if gated:
        case.inputs[first][..., 1::2, :], case.weights[0].values[..., 1::2, :] = 0, 0
        gates = rng.uniform(-6, 6, (*bias.shape[:-1], columns))
        gates[..., 0], size[0] = rng.uniform(0.3, 2.0), 64
        bias[..., 0::2], bias[..., 1::2] = torch.from_numpy(gates), torch.from_numpy(size)
    else:
        size = np.where(np.arange(columns) < 64, 1, size)
        bias[:] = torch.from_numpy(rng.choice([-1, 1], bias.shape) * rng.uniform(0.05, 1, bias.shape) * 6 * size)
        shrink(case, first, rng, size)


def shrink(case: Case, first: int, rng: np.random.Generator, size: Array) -> None:
    """Gives the weights of column n random block scales times `size[n]`, 2**-16 or more, under a tensor's scale 256
    times smaller, so that none is zero."""
    weight = case.weights[0]
    packed = weight.packed.view(torch.uint8).numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(weight.values.shape)
    shape = (*codes.shape[:-1], codes.shape[-1] // 16)
    scales = (rng.uniform(0.25, 1, shape) * 256 * size[:, None]).astype(ml_dtypes.float8_e4m3fn)
    tiled = np.stack([tile(expert.view(np.uint8)) for expert in scales])
    case.inputs[first + 1] = torch.from_numpy(tiled).view(torch.int8)
    case.inputs[first + 2] = weight.tensor_scale / 256
    weight.values = (
        codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        * np.repeat(scales.astype(np.float64), 16, axis=-1)
        * float64(case.inputs[first + 2])[:, None, None]
    )


ONE_FAMILY = pytest.mark.parametrize("emulated_gpu", ["b200"], indirect=True)  # both have the same epilogue


@ONE_FAMILY
@pytest.mark.parametrize("activation", [1, 2, 3])  # the others: test_emulated_rounding.py
def test_small_blocks_beside_large(emulated: PluginHost, emulated_gpu: Gpu, seed: int, activation: int) -> None:
    """In many rows, so that the code of every column sees each part of its activation."""
    m, k, i = 64, 64, 160
    rng = np.random.default_rng(seed)
    case = op_inputs.gated_mlp(rng, m, k, i, i, torch.float16)
    identity_down(case, i, 5)
    spread(case, 1, rng, gated=True)
    attributes = {"activation": activation, "quantize_activations": 1, "alpha": 1.5, "limit": 70.0}
    attributes["scale_search"] = search = activation % 3
    x = quantize(float64(case.inputs[0]).astype(np.float32), 0, search).values
    pre = x @ case.weights[0].values.T + float64(case.inputs[4])
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, 1.5, 70.0)
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, "NVFP4GatedMLP", case.inputs, attributes, tactic, again=False)
        check_hidden(y, hidden, 0.0, search)


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("which", "hidden_scale", "scale_search"), [(0, 0.0, 0), (1, 2.0**-7, 0), (2, 0.0, 1), (3, 2.0**-7, 2)]
)
@pytest.mark.parametrize(("m", "k", "i", "activations"), [(5, 64, 32, (7, 8, 6, 1)), (131, 96, 160, (3, 4, 5, 2))])
def test_hidden_values_of_a_gated_mlp(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    k: int,
    i: int,
    activations: tuple[int, ...],
    which: int,
    hidden_scale: float,
    scale_search: int,
) -> None:
    activation = activations[which]
    case = op_inputs.gated_mlp(np.random.default_rng(seed), m, k, i, i, torch.float16)
    identity_down(case, i, 5)
    case.inputs[-1] = torch.tensor(hidden_scale)
    if which == 2:  # what is made of a bias beyond the matrix would be the largest by far
        case.inputs[0] *= 2.0**-6
        case.inputs[4] *= 2.0**-6
    attributes = {
        "activation": activation,
        "quantize_activations": 1,
        "scale_search": scale_search,
        "alpha": 1.5,
        "limit": 2.0,
    }
    x = quantize(float64(case.inputs[0]).astype(np.float32), 0, scale_search).values
    pre = x @ case.weights[0].values.T + float64(case.inputs[4])
    hidden = gated_activate(pre[:, 0::2], pre[:, 1::2], activation, 1.5, 2.0)
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, "NVFP4GatedMLP", case.inputs, attributes, tactic, again=m < LARGE)
        check_hidden(y, hidden, hidden_scale, scale_search)


@BOTH_FAMILIES
@pytest.mark.parametrize(("hidden_scale", "scale_search"), [(0.0, 2), (2.0**-7, 0)])
@pytest.mark.parametrize(("m", "k", "i", "activation"), [(3, 64, 32, 4), (130, 96, 160, 2)])
def test_hidden_values_of_a_plain_mlp(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    k: int,
    i: int,
    activation: int,
    hidden_scale: float,
    scale_search: int,
) -> None:
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, k, i, i, torch.float16, gated=0)
    identity_down(case, i, 6)
    case.inputs[-1] = torch.tensor([hidden_scale])
    attributes = {
        "activation": activation,
        "quantize_activations": 1,
        "scale_search": scale_search,
        "gated": 0,
        "norm": 0,
        "residual": 0,
    }
    x = quantize(float64(case.inputs[0]).astype(np.float32), 0, scale_search).values
    hidden = activate(x @ case.weights[0].values[0].T + float64(case.inputs[5])[0], activation)
    for tactic in tactics(emulated_gpu):
        (y,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, tactic, again=m < LARGE)
        check_hidden(y, hidden, hidden_scale, scale_search)


@BOTH_FAMILIES
@pytest.mark.parametrize(("gated", "residual"), [(0, 1), (1, 0), (1, 1)])
def test_layers_against_the_generic_kernels(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, gated: int, residual: int
) -> None:
    """But for sums that round differently and meet a rounding boundary of NVFP4."""
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 2, 6, 32, 32, 32, torch.bfloat16, gated=gated)
    attributes = {"activation": 5, "norm": 1, "residual": residual, "epsilon": 1e-5, "quantize_activations": 1}
    attributes["gated"] = gated
    (generic,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, GENERIC)
    (y,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, W4A4)
    assert (y == generic).float().mean() > 0.98
    assert torch.linalg.norm((y - generic).float()) <= 0.05 * torch.linalg.norm(generic.float())


@BOTH_FAMILIES
@pytest.mark.parametrize(("gated", "norm"), [(0, 0), (1, 1)])
def test_static_scales_take_three_launches(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, gated: int, norm: int
) -> None:
    """And give the bits of the passes that look whether a scale is given. The quantizer normalizes; the first GEMM
    writes packed E2M1, padded block scales and one tensor scale; nothing else."""
    m, k, i = 130, 64, 96
    case = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, k, i, 24, torch.float16, gated=gated)
    case.inputs[-2:] = torch.tensor([0.004]), torch.tensor([0.01])
    attributes = {"activation": 3, "quantize_activations": 1, "gated": gated, "norm": norm, "residual": 0}
    (expected,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes, W4A4)
    emulated_gpu.launches.clear()
    (y,) = run(emulated, "NVFP4PersistentMLP", case.inputs, attributes | {"static_scales": 1}, W4A4)
    assert torch.equal(y, expected)
    launches = emulated_gpu.launches[: len(emulated_gpu.launches) // 2]  # enqueue runs twice, see run()
    _, up, _ = launches
    assert up.counters is not None
    assert up.counters.bytes_written["global"] == m * i // 2 + 256 * 8 + 4


@BOTH_FAMILIES
def test_bytes_of_a_gated_mlp(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Distinct bytes of global memory, the workspace included, against inputs, weights, scales and output."""
    m, k, i, h = 4, 512, 256, 512
    case = op_inputs.gated_mlp(np.random.default_rng(seed), m, k, i, h, torch.bfloat16)
    case.inputs[-2:] = torch.tensor(0.004), torch.tensor(0.01)
    memory = emulated_gpu.device.memory
    memory.count_distinct, memory.distinct = True, 0
    try:
        attributes = {"activation": 3, "quantize_activations": 1, "static_scales": 1}
        (y,) = run(emulated, "NVFP4GatedMLP", case.inputs, attributes, W4A4)
    finally:
        memory.count_distinct = False
    ideal = sum(tensor.numel() * tensor.element_size() for tensor in (*case.inputs, y))
    assert ideal * 0.99 <= memory.distinct / 2 <= ideal * 1.05


@EVERY_GPU
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
