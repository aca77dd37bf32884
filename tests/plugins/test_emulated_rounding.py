"""Hidden values of W4A4 kernels beside the boundaries between NVFP4's codes, on the emulator: an activation that is
wrong by a few millionths makes another code."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import Array, gated_activate, quantize
from op_inputs import Case, float64
from test_emulated_w4a4 import identity_down, tactics
from test_kernels import run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["b200"], indirect=True)]
W4A4 = 3
WIDTH, SCALE = 256, 2.0**-7
ALPHA, LIMIT = 1.5, 70.0
# Where E2M1's codes meet, and the codes below and above.
BOUNDARIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
BELOW, ABOVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4.0]), np.array([0.5, 1, 1.5, 2, 3, 4, 6.0])
# How far from a boundary, relative to the gate times its up: beyond what float32's rounding moves, and not much.
NEAREST, FARTHEST = 2e-6, 6e-6


def beside_boundaries(rng: np.random.Generator, hidden_of: Callable[[Array, Array], Array]) -> tuple[Array, ...]:
    """FP16 gates and ups of columns, and the hidden values that they become. Each block's first is its largest; the
    others lie below and above boundaries in turn. Gates lie from -8 to 8."""
    gates, ups, hidden = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for column in range(WIDTH):
        if column % 16 == 0:
            unit = SCALE * rng.integers(8, 16) / 8 * 2.0 ** rng.integers(-1, 4)  # an E4M3 block scale
            gate = rng.uniform(1, 8, 100).astype(np.float16).astype(np.float64)
            up = solve(hidden_of, gate, np.full(gate.shape, 6 * unit)).astype(np.float16).astype(np.float64)
            # FP16 rounds an up near -1 coarsely where the activation adds 1: the block's scale would be another.
            nearest = np.abs(hidden_of(gate, up) - 6 * unit).argmin()
            gates[column], ups[column], hidden[column] = gate[nearest], up[nearest], 6 * unit
            continue
        which = rng.integers(0, 7, 6000)
        tried = rng.uniform(-8, 8, which.size).astype(np.float16).astype(np.float64)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            up = solve(hidden_of, tried, BOUNDARIES[which] * unit).astype(np.float16).astype(np.float64)
            distance = hidden_of(tried, up) - BOUNDARIES[which] * unit
            relative = np.abs(distance) / np.abs(tried * up)
        good = (relative > NEAREST) & (relative < FARTHEST) & (np.abs(up) < LIMIT) & (distance * (column % 2 - 0.5) > 0)
        (found,) = np.nonzero(good)
        assert found.size, (column, unit)
        chosen = found[0]
        gates[column], ups[column] = tried[chosen], up[chosen]
        hidden[column] = unit * (ABOVE if distance[chosen] > 0 else BELOW)[which[chosen]]
    return gates, ups, hidden


def solve(hidden_of: Callable[[Array, Array], Array], gate: Array, hidden: Array) -> Array:
    """The up, of which the hidden value is a linear function."""
    at_zero = hidden_of(gate, np.zeros_like(gate))
    return np.asarray((hidden - at_zero) / (hidden_of(gate, np.ones_like(gate)) - at_zero))


def set_biases(case: Case, first: int, gates: Array, ups: Array) -> None:
    """What up makes of x, whose inputs begin at `first`: for every row the same, with the bias alone."""
    case.inputs[0].zero_()
    bias = case.inputs[first + 3]
    bias[..., 0::2], bias[..., 1::2] = torch.from_numpy(gates), torch.from_numpy(ups)
    case.inputs[-1] = torch.tensor(SCALE)


def gated_mlp(rng: np.random.Generator, m: int) -> tuple[str, Case, int, dict[str, float]]:
    case = op_inputs.gated_mlp(rng, m, 32, WIDTH, WIDTH, torch.float16)
    identity_down(case, WIDTH, 5)
    return "NVFP4GatedMLP", case, 1, {"alpha": ALPHA, "limit": LIMIT}


def experts(rng: np.random.Generator, m: int) -> tuple[str, Case, int, dict[str, float]]:
    """One of two takes all tokens."""
    case = op_inputs.moe(rng, m, WIDTH, WIDTH, 2, torch.float16)
    identity_down(case, WIDTH, 7)
    case.inputs[1].zero_()
    case.inputs[2][:] = torch.tensor([9.0, -9])
    return "NVFP4MoE", case, 3, {"alpha": ALPHA, "limit": LIMIT, "top_k": 1, "scoring": 2}


@pytest.mark.parametrize("make", [gated_mlp, experts])
@pytest.mark.parametrize("activation", range(3, 9))
def test_beside_boundaries(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    make: Callable[..., tuple[str, Case, int, dict[str, float]]],
    activation: int,
) -> None:
    rng = np.random.default_rng(seed)
    op, case, first, attributes = make(rng, 1)
    gates, ups, hidden = beside_boundaries(rng, lambda g, u: gated_activate(g, u, activation, ALPHA, LIMIT))
    set_biases(case, first, gates, ups)
    attributes |= {"activation": activation, "quantize_activations": 1}
    for tactic in tactics(emulated_gpu) if op == "NVFP4GatedMLP" else [W4A4]:
        (y,) = run(emulated, op, case.inputs, attributes, tactic, again=False)
        wrong = np.flatnonzero(~np.isclose(float64(y).reshape(-1), hidden, 1e-3, 0))
        assert not wrong.size, [(float(gates[c]), float(ups[c]), float(hidden[c]), float(y[..., c])) for c in wrong]


def of_every_scale(rng: np.random.Generator) -> Array:
    """Blocks of values near halves of an E2M1 unit, beside a largest of 5 to 7.5 units, whose scales are E4M3's first,
    its subnormals among them, its last, and others; one block is zero, two are beyond the last scale."""
    codes = np.array([0, 1, 2, 2, 3, 5, 8, 40, 80, 121, 122, 123, 124, 125, 126, 127], np.uint8)
    units = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    units[-1] = 480.0
    halves = rng.integers(-10, 11, (len(codes), 16)) / 2 + rng.uniform(-0.05, 0.05, (len(codes), 16))
    halves[:, 1:8] = rng.choice([-0.5, -0.25, 0.25, 0.5, 0.75], (len(codes), 7))
    halves[:, 0] = rng.uniform(5, 7.5, len(codes))
    halves[2, 0], halves[2, 1:] = 4.6, 0.25  # whose best scale is half of that which its largest asks for
    return np.asarray((halves * units[:, None] * SCALE).astype(np.float16).astype(np.float64))


@pytest.mark.parametrize("make", [gated_mlp, experts])
@pytest.mark.parametrize("scale_search", [0, 1, 2])
def test_scales_of_blocks(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    make: Callable[..., tuple[str, Case, int, dict[str, float]]],
    scale_search: int,
) -> None:
    """Hidden values without an error, so that of candidates as good as each other too the right one is taken."""
    rng = np.random.default_rng(seed)
    op, case, first, attributes = make(rng, 1)
    blocks = of_every_scale(rng)
    set_biases(case, first, np.ones(WIDTH), blocks.reshape(-1))
    attributes |= {"activation": int(Activation.RELU), "quantize_activations": 1, "scale_search": scale_search}
    expected = quantize(blocks.reshape(1, -1).astype(np.float32), SCALE, scale_search).values
    for tactic in tactics(emulated_gpu) if op == "NVFP4GatedMLP" else [W4A4]:
        (y,) = run(emulated, op, case.inputs, attributes, tactic, again=False)
        np.testing.assert_allclose(float64(y).reshape(1, -1), expected, 1e-3, 1e-9)
