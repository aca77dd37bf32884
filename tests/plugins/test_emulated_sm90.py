"""The SM90 W4A16 kernels (wgmma, clusters, tensor maps), from enqueue down to their PTX, on the PTX
emulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import op_inputs
import pytest
import test_moe
import test_w4a16_ranges
import torch
from test_emulated_w4a4 import identity_down

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)]

GENERIC, W4A16, W4A16_SM90 = 1, 2, 8
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SILU = Activation.SILU


#: Of the persistent MLP: for up to 1, 8, 16, 32 and 64 tokens, in either type.
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
EVERY_TOKEN = pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
TOKENS_BEYOND = pytest.mark.parametrize("m", [1, 7, 15, 30, 50])


def check(
    host: PluginHost, op: str, inputs: list[torch.Tensor], attributes: dict[str, Any], tactic: int = W4A16
) -> None:
    with host.session(op, inputs, attributes, tactic=tactic) as session:
        (y,) = session.run(inputs)
    reference = OPS[op].reference(*inputs, **attributes)
    error = float((y.double() - reference.double()).norm() / reference.double().norm())
    assert error < TOLERANCE[y.dtype]


def check_launches(gpu: Gpu, calls: int) -> None:
    """Of resident layers: what says whether something has been written is erased, then all layers in one launch."""
    expected = ["sm90_w4a16_erase", "sm90_w4a16_mlpI"] * calls
    kernels = [launch.kernel for launch in gpu.launches]
    assert all(name in kernel for name, kernel in zip(expected, kernels, strict=True))


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(20, 77, 288, torch.float16), (50, 300, 1056, torch.bfloat16)],
    ids=["rows, K and tokens end inside a tile", "K split over blocks"],
)
def test_linear(emulated: PluginHost, seed: int, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    call = op_inputs.linear(np.random.default_rng(seed), m, n, k, dtype)
    check(emulated, "NVFP4Linear", call.inputs, {"activation": Activation.SILU})


@pytest.mark.parametrize(
    ("sms", "m", "n", "k", "dtype"),
    [
        (132, 3, 77, 544, torch.float16),  # a chunk of K for each block
        (2, 6, 300, 544, torch.bfloat16),  # multiplied as FP16
        (2, 12, 600, 544, torch.bfloat16),  # a tile and a half for each
        (4, 16, 300, 1056, torch.float16),  # a tile's end and the next one's begin; a tile of three blocks
        (3, 9, 700, 160, torch.float16),  # whole tiles alone
        (1, 64, 300, 1056, torch.float16),  # more chunks of activations than panels by far
        (1, 60, 77, 2080, torch.bfloat16),
        (1, 20, 77, 3104, torch.float16),
    ],
)
def test_linear_on_few_sms(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, sms: int, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    emulated_gpu.resize(sm_count=sms)
    call = op_inputs.linear(np.random.default_rng(seed), m, n, k, dtype)
    emulated_gpu.launches.clear()
    check(emulated, "NVFP4Linear", call.inputs, {"activation": Activation.GELU}, W4A16_SM90)
    names = ["sm90_w4a16_linear_image"] * (m > 32) + ["sm90_w4a16_linearI", "sm90_w4a16_join"]
    launched = [launch.kernel for launch in emulated_gpu.launches]
    assert all(name in kernel for name, kernel in zip(names, launched, strict=True)), launched


@pytest.mark.parametrize(
    ("sms", "shape", "dtype", "attributes"),
    [
        (132, (2, 1, 544, 800, 544), torch.bfloat16, {"gated": 1, "norm": 0, "residual": 0}),
        (132, (2, 1, 288, 544, 288), torch.float16, {"gated": 1, "norm": 1, "residual": 1}),
        (2, (1, 1, 1312, 1056, 77), torch.float16, {"gated": 0, "norm": 0, "residual": 0}),
        (132, (3, 20, 288, 544, 288), torch.float16, {"gated": 1, "norm": 1, "residual": 1}),
        (132, (2, 50, 800, 544, 800), torch.bfloat16, {"gated": 1, "norm": 0, "residual": 0}),
        # More parts of a row's squares than a lane asks for at once.
        (132, (1, 12, 2208, 544, 77), torch.bfloat16, {"gated": 0, "norm": 1, "residual": 0}),
        (132, (2, 3, 544, 1056, 544), torch.float16, {"gated": 0, "norm": 0, "residual": 1}),
        (132, (3, 7, 288, 800, 288), torch.bfloat16, {"gated": 1, "norm": 1, "residual": 0}),
        # More chunks of activations than a warp has lanes.
        (2, (1, 17, 8480, 64, 33), torch.float16, {"gated": 1, "norm": 0, "residual": 0}),
        # A block has several tiles in a phase, of more chunks than it asks for ahead.
        (2, (1, 3, 1312, 1056, 77), torch.float16, {"gated": 0, "norm": 0, "residual": 0}),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_resident_layers(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    sms: int,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    attributes: dict[str, int],
) -> None:
    """In one launch, with each number of tokens that the kernel is compiled for; widths end inside tiles."""
    emulated_gpu.resize(sm_count=sms)
    call = op_inputs.persistent_mlp(np.random.default_rng(seed), *shape, dtype, gated=attributes["gated"])
    emulated_gpu.launches.clear()
    attributes = {"activation": Activation.SILU, **attributes}
    check(emulated, "NVFP4PersistentMLP", call.inputs, attributes, W4A16_SM90)
    check_launches(emulated_gpu, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 7, 16, 30, 50])
@pytest.mark.parametrize("down", [0, 1], ids=["up", "down"])
def test_every_bit_of_resident_layers(emulated: PluginHost, seed: int, down: int, m: int, dtype: torch.dtype) -> None:
    """Sums without an error, of whole tiles: one projection is the identity, x is zeros and ones. But hidden
    values of a single token become 16-bit integers."""
    width = 256
    rng = np.random.default_rng(seed)
    case = op_inputs.persistent_mlp(rng, 1, m, width, width, width, dtype, gated=0)
    x, weight = case.inputs[0], case.weights[down]
    identity_down(case, width, 2 if down else 6)
    scale, bias = (8, 9) if down else (4, 5)
    exact = (weight.values / case.inputs[scale].double().numpy()[:, None, None])[0]
    case.inputs[scale], case.inputs[bias] = torch.ones(1), torch.zeros_like(case.inputs[bias])
    x.copy_(torch.from_numpy(rng.integers(0 if down else -1, 2, x.shape)))
    attributes = {"activation": Activation.RELU, "gated": 0, "norm": 0, "residual": 0}
    with emulated.session("NVFP4PersistentMLP", case.inputs, attributes, tactic=W4A16_SM90) as session:
        (y,) = session.run(case.inputs)
    sums = op_inputs.float64(x) @ (np.round(exact * 1024) / 1024).T
    expected = torch.from_numpy(sums if down else np.maximum(sums, 0)).to(dtype).double()
    assert (y.double() - expected).abs().max() <= (0 if down or m > 1 else 2.0**-13 * expected.max())


@pytest.mark.parametrize(
    ("m", "dtype", "activation"),
    [
        (1, torch.float16, Activation.GELU),
        (1, torch.bfloat16, Activation.GELU_TANH),
        (7, torch.float16, Activation.GELU_TANH),
        (7, torch.bfloat16, Activation.GELU),
        (16, torch.float16, Activation.GELU_TANH),
        (16, torch.bfloat16, Activation.GELU_QUICK),
        (30, torch.float16, Activation.GELU_TANH),
        (30, torch.bfloat16, Activation.GELU),
        (50, torch.float16, Activation.GELU_QUICK),
        (50, torch.bfloat16, Activation.GELU_TANH),
    ],
)
def test_wide_norm(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, dtype: torch.dtype, activation: Activation
) -> None:
    """A row's squares are in more parts than a lane asks for at once, which come late; without epsilon it would be
    twice as large."""
    emulated_gpu.resize(sm_count=12)
    emulated_gpu.device.disorder = 0.5
    call = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, 2208, 64, 77, dtype, gated=0)
    attributes = {"gated": 0, "norm": 1, "residual": 0, "epsilon": 3.0, "activation": activation}
    check(emulated, "NVFP4PersistentMLP", call.inputs, attributes, W4A16_SM90)


@TYPES
@TOKENS_BEYOND
def test_parts_that_come_late(emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, dtype: torch.dtype) -> None:
    """Sixteen of each sum of down, which are not all there when they are first asked for."""
    emulated_gpu.resize(sm_count=32)
    emulated_gpu.device.disorder = 0.5
    call = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, 256, 4096, 256, dtype, gated=0)
    attributes = {"gated": 0, "norm": 1, "residual": 1, "activation": SILU}
    check(emulated, "NVFP4PersistentMLP", call.inputs, attributes, W4A16_SM90)


@TYPES
@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_rings_go_round(emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, dtype: torch.dtype) -> None:
    """Of slots, panels and barriers, several times: two blocks do all tiles."""
    emulated_gpu.resize(sm_count=2)
    call = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, 1312, 288, 77, dtype, gated=1)
    attributes = {"gated": 1, "norm": 1, "residual": 0, "activation": SILU}
    check(emulated, "NVFP4PersistentMLP", call.inputs, attributes, W4A16_SM90)


@EVERY_TOKEN
@pytest.mark.parametrize(("gated", "dtype"), [(0, torch.float16), (1, torch.bfloat16)], ids=["plain", "gated"])
def test_activations(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, gated: int, m: int, dtype: torch.dtype
) -> None:
    """Of all rows of a tile."""
    emulated_gpu.resize(sm_count=2)
    call = op_inputs.persistent_mlp(np.random.default_rng(seed), 1, m, 64, 256 // (1 + gated), 33, dtype, gated=gated)
    for activation in [a for a in Activation if gated or a not in GATED_ONLY]:
        attributes = {"activation": activation, "alpha": 1.5, "limit": 1.0, "gated": gated, "norm": 0, "residual": 0}
        check(emulated, "NVFP4PersistentMLP", call.inputs, attributes, W4A16_SM90)


@pytest.mark.parametrize("size", [1e4, 1e30])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU_QUICK, *GATED_ONLY])
def test_gates_far_from_zero(emulated: PluginHost, seed: int, activation: Activation, size: float) -> None:
    """Where sigmoids are zero or one, and what they are made of has no end."""
    call = op_inputs.gated_mlp(np.random.default_rng(seed), 12, 64, 64, 33, torch.bfloat16)
    up_bias = call.inputs[4]
    signs = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], 64))
    up_bias[0::2] = (signs * size).to(up_bias.dtype)
    check(emulated, "NVFP4GatedMLP", call.inputs, {"activation": activation}, W4A16_SM90)


def test_workspace_for_many_tokens_is_enough_for_few(emulated: PluginHost, seed: int) -> None:
    """TensorRT asks for that of a profile's most tokens, and more than 64 go through in blocks."""
    sizes = []
    for m in (1, 2, 8, 9, 16, 17, 33, 64, 65, 72, 200):
        call = op_inputs.persistent_mlp(np.random.default_rng(seed), 100, m, 96, 1056, 96, torch.float16, gated=1)
        with emulated.session("NVFP4PersistentMLP", call.inputs, {"gated": 1}, tactic=W4A16_SM90) as session:
            sizes.append(session.workspace_size)
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("kind", ["largest", "smallest"])
def test_ends_of_the_range(emulated: PluginHost, seed: int, kind: str) -> None:
    test_w4a16_ranges.test_ends_of_the_range(emulated, seed, kind, "any", 5, W4A16_SM90, torch.bfloat16)


def test_nan_and_infinity_reach_their_token_s_output(emulated: PluginHost, seed: int) -> None:
    test_w4a16_ranges.test_nan_and_infinity_reach_their_token_s_output(emulated, seed, 5, W4A16_SM90, torch.bfloat16)


def test_more_tokens_than_a_block_of_resident_layers(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    call = op_inputs.gated_mlp(np.random.default_rng(seed), 70, 96, 64, 33, torch.float16)
    emulated_gpu.launches.clear()
    check(emulated, "NVFP4GatedMLP", call.inputs, {"activation": Activation.GELU_QUICK}, W4A16_SM90)
    check_launches(emulated_gpu, 2)


def test_a_failed_call_leaves_the_next_alone(
    emulated: PluginHost, emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layers = op_inputs.gated_mlp(rng, 3, 64, 64, 33, torch.float16).inputs
    with monkeypatch.context() as small:
        small.setattr(emulated_gpu, "target", replace(emulated_gpu.target, shared_per_sm=44 * 1024))
        with pytest.raises(HostError, match="sm90_w4a16_mlp: cudaErrorInvalidValue"):
            check(emulated, "NVFP4GatedMLP", layers, {"activation": Activation.SILU}, W4A16_SM90)
    check(emulated, "NVFP4GatedMLP", layers, {"activation": Activation.SILU}, GENERIC)


MIXTURES: list[tuple[int, int, int, torch.dtype, dict[str, Any]]] = [
    (3, 288, 160, torch.bfloat16, {"top_k": 2, "shared": 1}),
    (30, 96, 288, torch.bfloat16, {"top_k": 2, "activation": 7, "scoring": 4}),  # 1 to 3 columns, several jobs
    (20, 544, 96, torch.float16, {"top_k": 1, "shared": 1, "shared_gated": 1, "scale_input": 1, "scoring": 3}),
    (10, 64, 1056, torch.bfloat16, {"top_k": 3, "gated": 0, "activation": 4, "scoring": 5}),  # down in parts
    (30, 1312, 96, torch.bfloat16, {"top_k": 2, "shared": 1}),  # wide jobs; more chunks of activations than panels
    (36, 96, 288, torch.float16, {"top_k": 2, "gated": 0, "activation": 4, "scale_input": 1}),
    (54, 544, 288, torch.float16, {"top_k": 2, "shared": 1}),  # wider ones
    (70, 64, 160, torch.bfloat16, {"top_k": 3, "gated": 0, "activation": 4, "scale_input": 1}),
]


@pytest.mark.parametrize(("m", "h", "i", "dtype", "attributes"), MIXTURES)
def test_mixture(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    m: int,
    h: int,
    i: int,
    dtype: torch.dtype,
    attributes: dict[str, Any],
) -> None:
    emulated_gpu.resize(sm_count=2)
    case = op_inputs.moe(np.random.default_rng(seed), m, h, i, 3, dtype, s=64, gated=attributes.get("gated", 1))
    emulated_gpu.launches.clear()
    test_moe.check(emulated, case, attributes, dtype, W4A16_SM90)
    own_images = m > 8 or "scale_input" in attributes
    plan = ["moe_route"] * (m > 32) + ["moe_plan"]
    names = [*plan, *["sm90_w4a16_moe_images"] * own_images, "sm90_w4a16_moe", "moe_sum"]
    kernels = [launch.kernel for launch in emulated_gpu.launches]
    assert kernels
    expected = names * (len(kernels) // len(names))
    assert all(name in kernel for name, kernel in zip(expected, kernels, strict=True))


@pytest.mark.parametrize(("m", "scale_input"), [(3, 0), (30, 1), (60, 0)])
def test_tokens_of_all_sizes(emulated: PluginHost, seed: int, m: int, scale_input: int) -> None:
    """By mma.sync, and of wide jobs."""
    case = test_moe.of_all_sizes(np.random.default_rng(seed), m, 288, 96, 3)
    attributes = {"top_k": 2, "shared": 1, "scoring": 1, "scale_input": scale_input}
    test_moe.check(emulated, case, attributes, torch.bfloat16, W4A16_SM90)


@pytest.mark.parametrize("m", [10, 30])
@test_moe.BEYOND_HALF
def test_hidden_values_beyond_half(emulated: PluginHost, seed: int, attributes: dict[str, Any], m: int) -> None:
    case = test_moe.beyond_half(np.random.default_rng(seed), m, 96, 480, 3, attributes.get("gated", 1))
    test_moe.check(emulated, case, {"top_k": 2, **attributes}, torch.bfloat16, W4A16_SM90)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sms", "m", "h", "i", "attributes"),
    [
        (1, 1, 2080, 128, {"top_k": 1}),  # more chunks of activations than panels
        (5, 1, 800, 160, {"top_k": 2}),  # 4 tiles of 4 chunks
        (4, 1, 544, 160, {"top_k": 1, "shared": 1, "shared_gated": 1}),  # 3 tiles of 3
        (16, 2, 288, 96, {"top_k": 2, "gated": 0, "activation": 4, "scale_input": 1}),  # fewer chunks than SMs
    ],
)
def test_mixture_shared_evenly(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    sms: int,
    m: int,
    h: int,
    i: int,
    attributes: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    emulated_gpu.resize(sm_count=sms)
    case = op_inputs.moe(np.random.default_rng(seed), m, h, i, 3, dtype, s=64, gated=attributes.get("gated", 1))
    emulated_gpu.launches.clear()
    test_moe.check(emulated, case, attributes, dtype, W4A16_SM90)
    name = "13__nv_bfloat16" if dtype == torch.bfloat16 else "6__half"
    assert any(f"sm90_w4a16_moeI{name}Lb1" in launch.kernel for launch in emulated_gpu.launches)


@pytest.mark.parametrize("experts", [256, 300, 520])
def test_mixture_of_many_experts(emulated: PluginHost, seed: int, experts: int) -> None:
    """Plans of other launches, or whose warps hold more experts a lane, beside which images are made."""
    attributes = {"top_k": 2, "shared": 1, "shared_gated": 1, "n_group": 4, "topk_group": 2, "group_score_top": 2}
    case = op_inputs.moe(np.random.default_rng(seed), 2, 32, 32, experts, torch.bfloat16, s=32)
    test_moe.check(emulated, case, attributes, torch.bfloat16, W4A16_SM90)


def test_workspace_of_a_mixture_for_many_tokens_is_enough_for_few(emulated: PluginHost, seed: int) -> None:
    sizes = []
    for m in (1, 2, 8, 9, 16, 256, 257, 260):
        case = op_inputs.moe(np.random.default_rng(seed), m, 64, 96, 4, torch.float16)
        with emulated.session("NVFP4MoE", case.inputs, {"top_k": 2}, tactic=W4A16_SM90) as session:
            sizes.append(session.workspace_size)
    assert sizes == sorted(sizes)


def test_neighbouring_experts_rows_stay_out_of_a_mixture(emulated: PluginHost, seed: int) -> None:
    test_moe.test_neighbouring_experts_rows_stay_out(emulated, seed, W4A16_SM90, torch.float16)
