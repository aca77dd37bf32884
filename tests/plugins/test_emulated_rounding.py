"""Hidden values of W4A4 kernels beside the boundaries between NVFP4's codes, on the emulator: an activation that is
wrong by a few millionths makes another code."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import Array, Bytes, activate, gated_activate, pack, quantize, tile
from op_inputs import Case, float64
from test_emulated_w4a4 import identity_down, tactics
from test_kernels import run

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import PluginHost, Session
from trt_nvfp4.plugins.ops import Activation

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulated_gpu", ["b200"], indirect=True)]
W4A4 = 3
WIDTH, SCALE = 256, 2.0**-7
ROWS = 16
ALPHA, LIMIT = 1.5, 70.0
# Where E2M1's codes meet, and the codes below and above.
BOUNDARIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
BELOW, ABOVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4.0]), np.array([0.5, 1, 1.5, 2, 3, 4, 6.0])
# How far from a boundary, relative to it or to the gate times its up: beyond what rounding in float32 moves, which was
# measured as 3e-7 to 4e-7.
NEAREST, FARTHEST = 8e-7, 2e-5
ROUGH = (Activation.GELU, Activation.GELU_TANH, Activation.GELU_QUICK)
LAST = 3 * 2.0**-31  # digit of sums


def beside_boundaries(
    rng: np.random.Generator, hidden_of: Callable[[Array, Array], Array], rough: bool
) -> tuple[Array, ...]:
    """FP16 gates and ups of columns, and the hidden values that they become. One of each block, in each another, is its
    largest; the others lie below and above boundaries in turn. Gates lie from -16 to 8, half of them from -1 to 1.
    `rough`: the activation of a gate far below zero is only as good as gate times up is, because it subtracts nearly
    equal numbers, or rounds before the exponential."""
    gates, ups, hidden = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for place in range(WIDTH):
        block, turn = divmod(place, 16)
        column = 16 * block + (block + turn) % 16
        if turn == 0:
            unit = SCALE * rng.integers(8, 16) / 8 * 2.0 ** rng.integers(-6, 4)  # an E4M3 block scale
            gate = rng.uniform(1, 8, 200) * (1 if rough else rng.choice([-1, 1], 200))
            gate = gate.astype(np.float16).astype(np.float64)
            up = solve(hidden_of, gate, np.full(gate.shape, 6 * unit)).astype(np.float16).astype(np.float64)
            # FP16 rounds an up near -1 coarsely where the activation adds 1: the block's scale would be another.
            nearest = np.abs(hidden_of(gate, up) - 6 * unit).argmin()
            gates[column], ups[column], hidden[column] = gate[nearest], up[nearest], 6 * unit
            continue
        for span in [(-1, 1), (-16, 8)] if turn // 2 % 2 else [(-16, 8)]:
            which = rng.integers(0, 7, 6000)
            tried = rng.uniform(*span, which.size)
            tried = tried.astype(np.float16).astype(np.float64)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                boundary = BOUNDARIES[which] * unit
                up = solve(hidden_of, tried, boundary).astype(np.float16).astype(np.float64)
                distance = hidden_of(tried, up) - boundary
                relative = np.abs(distance) / (np.maximum(np.abs(tried * up), boundary) if rough else boundary)
            good = (
                (relative > NEAREST) & (relative < FARTHEST) & (np.abs(up) < LIMIT) & (distance * (turn % 2 - 0.5) > 0)
            )
            if good.any():
                break
        assert good.any(), (column, unit)
        chosen = np.where(good, relative, np.inf).argmin()
        gates[column], ups[column] = tried[chosen], up[chosen]
        hidden[column] = unit * (ABOVE if distance[chosen] > 0 else BELOW)[which[chosen]]
    return gates, ups, hidden


def solve(hidden_of: Callable[[Array, Array], Array], gate: Array, hidden: Array) -> Array:
    """The up, of which the hidden value is a linear function."""
    at_zero = hidden_of(gate, np.zeros_like(gate))
    return np.asarray((hidden - at_zero) / (hidden_of(gate, np.ones_like(gate)) - at_zero))


def set_biases(case: Case, first: int, gates: Array, ups: Array) -> None:
    """What up makes of x, whose inputs begin at `first`: for every row the same, with the bias alone. Without gates it
    makes ups."""
    case.inputs[0].zero_()
    bias = case.inputs[first + 3].view(-1, WIDTH, case.inputs[first + 3].shape[-1] // WIDTH)
    bias[..., 0], bias[..., -1] = torch.from_numpy(gates), torch.from_numpy(ups)
    case.inputs[-1] = torch.tensor(SCALE)


def gated_mlp(rng: np.random.Generator, m: int) -> tuple[str, Case, int, dict[str, float]]:
    case = op_inputs.gated_mlp(rng, m, 32, WIDTH, WIDTH, torch.float16)
    identity_down(case, WIDTH, 5)
    return "NVFP4GatedMLP", case, 1, {"alpha": ALPHA, "limit": LIMIT}


def experts(rng: np.random.Generator, m: int, gated: int = 1) -> tuple[str, Case, int, dict[str, float]]:
    """One of two takes all tokens."""
    case = op_inputs.moe(rng, m, WIDTH, WIDTH, 2, torch.float16, gated=gated)
    identity_down(case, WIDTH, 7)
    case.inputs[1].zero_()
    case.inputs[2][:] = torch.tensor([9.0, -9])
    return "NVFP4MoE", case, 3, {"alpha": ALPHA, "limit": LIMIT, "top_k": 1, "scoring": 2, "gated": gated}


def plain_experts(rng: np.random.Generator, m: int) -> tuple[str, Case, int, dict[str, float]]:
    return experts(rng, m, gated=0)


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
    gates, ups, hidden = beside_boundaries(
        rng, lambda g, u: gated_activate(g, u, activation, ALPHA, LIMIT), activation in ROUGH
    )
    set_biases(case, first, gates, ups)
    attributes |= {"activation": activation, "quantize_activations": 1}
    for tactic in tactics(emulated_gpu) if op == "NVFP4GatedMLP" else [W4A4]:
        (y,) = run(emulated, op, case.inputs, attributes, tactic, again=False)
        wrong = np.flatnonzero(~np.isclose(float64(y).reshape(-1), hidden, 1e-3, 0))
        assert not wrong.size, [(float(gates[c]), float(ups[c]), float(hidden[c]), float(y[..., c])) for c in wrong]


def plain_beside_boundaries(rng: np.random.Generator, hidden_of: Callable[[Array], Array]) -> tuple[Array, Array]:
    """What is activated in each column, from -6 to 6, and the hidden values that it becomes, as above."""
    sums, hidden = np.zeros(WIDTH), np.zeros(WIDTH)
    grid = np.linspace(-6, 6, 20001)
    of_grid = hidden_of(grid)
    for place in range(WIDTH):
        block, turn = divmod(place, 16)
        column = 16 * block + (block + turn) % 16
        if turn == 0:
            # An E4M3 block scale. Half of the sums of each column's code are small.
            exponent = rng.integers(2, 4) if block // 2 % 2 else rng.integers(-1, 7)
            unit = SCALE * rng.integers(8, 16) / 8 * 2.0**exponent
            sums[column], hidden[column] = grid[np.abs(of_grid - 6 * unit).argmin()], 6 * unit
            continue
        side = rng.choice([-1, 1])
        for which in rng.permutation(np.arange(1, 8).repeat(2) * np.tile([1, -1], 7)):
            boundary = np.sign(which) * BOUNDARIES[abs(which) - 1] * unit
            roots = np.flatnonzero((of_grid[1:] < boundary) != (of_grid[:-1] < boundary))
            if not roots.size:
                continue
            root = rng.choice(roots)
            slope = (of_grid[root + 1] - of_grid[root]) / (grid[root + 1] - grid[root])
            size = max(abs(grid[root]), abs(boundary))
            wanted = boundary + side * 2 * NEAREST * size
            x = grid[root : root + 1]
            for _ in range(4):
                x = x + (wanted - hidden_of(x)) / slope
            x = representable(x)
            (away,) = (hidden_of(x) - boundary) * side / size
            if NEAREST < away < FARTHEST:
                code = (ABOVE if side * which > 0 else BELOW)[abs(which) - 1]
                sums[column], hidden[column] = x[0], np.sign(which) * code * unit
                break
        else:
            raise AssertionError(column, unit)
    return sums, hidden


def representable(x: Array) -> Array:
    """The nearest multiples of LAST with 22 binary digits, parts of which float32 adds up without an error."""
    step = LAST * 2.0 ** np.maximum(np.frexp(x / LAST)[1] - 22, 0)
    return np.asarray(np.round(x / step) * step)


def set_sums(case: Case, first: int, sums: Array) -> None:
    """What up makes of x, [m, WIDTH]: in row r, one digit to base four by each input 16 i + r, i from 0 to 15."""
    assert np.abs(sums).max() < 6, "16 digits to base four end at 6, 4**16 times LAST"
    set_biases(case, first, np.zeros(WIDTH), np.zeros(WIDTH))
    digits = np.round(np.abs(sums) / LAST).astype(np.int64)[..., None] >> 2 * np.arange(15, -1, -1) & 3
    codes = digits | (sums < 0)[..., None] << 3  # E2M1 halves
    packed, x = np.zeros((WIDTH, 16, 16), np.uint8), np.zeros((len(sums), 16, 16))
    powers = 2.0 ** np.arange(8, -8, -1)
    for row in range(len(sums)):
        packed[:, :, row], x[row, :, row] = codes[row], 6 * powers
    block_scales = np.tile(powers, (WIDTH, 1)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    set_up(case, first, packed.reshape(WIDTH, WIDTH), block_scales, 2.0**-17)
    case.inputs[0].copy_(torch.from_numpy(x.reshape(len(sums), WIDTH)))
    case.inputs[-2] = torch.tensor(1.0)


def set_up(case: Case, first: int, codes: Bytes, block_scales: Bytes, tensor_scale: float) -> None:
    """The weights of up, alike for all experts."""
    for at, value in enumerate((pack(codes), tile(block_scales), np.float32(tensor_scale)), first):
        alike = np.broadcast_to(value, case.inputs[at].shape)
        case.inputs[at] = torch.from_numpy(alike.copy()).view(case.inputs[at].dtype)


@pytest.mark.parametrize("activation", range(3, 7))
def test_plain_beside_boundaries(emulated: PluginHost, emulated_gpu: Gpu, seed: int, activation: int) -> None:
    rng = np.random.default_rng(seed)
    m = 4
    op, case, first, attributes = plain_experts(rng, m)
    rows = [plain_beside_boundaries(rng, lambda x: activate(x, activation)) for _ in range(m)]
    sums, hidden = (np.stack(parts) for parts in zip(*rows, strict=True))
    set_sums(case, first, sums)
    attributes |= {"activation": activation, "quantize_activations": 1}
    (y,) = run(emulated, op, case.inputs, attributes, W4A4, again=False)
    made = float64(y).reshape(m, WIDTH)
    wrong = ~np.isclose(made, hidden, 1e-3, 0)
    assert not wrong.any(), np.stack([sums[wrong], hidden[wrong], made[wrong]])


def of_every_scale(rng: np.random.Generator, case: Case, first: int) -> Array:
    """Hidden values [16, WIDTH] that inputs of the case make without an error, and without an activation: values
    beside a largest of 5 to 7.5 units, which each row has in another column of each block. Units are E4M3's first
    scales, its subnormals among them, its last, and others; two are far below the first, one beyond the last."""
    codes = np.array([0, 0, 1, 1, 2, 2, 2, 3, 40, 121, 122, 123, 124, 125, 126, 127], np.uint8)
    units = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    units[:2], units[-1] = 2.0**-13, 480.0
    largest = rng.uniform(5, 7.5, WIDTH)
    # E2M1 codes of weights: 6, or at most 4 and of either sign.
    weights = rng.integers(0, 7, (WIDTH, ROWS), np.uint8) | rng.integers(0, 2, (WIDTH, ROWS), np.uint8) << 3
    offsets = rng.choice([0, 0.25], WIDTH) + rng.integers(-50, 51, WIDTH) / 1024
    # Of candidates, another would win if errors of the largest were bounded elsewhere.
    for block, (most, others) in enumerate([(8, 0.3)] * 2 + [(5.625, 0.27)] * 2 + [(4.75, 0.25)], 2):
        columns = slice(16 * block, 16 * block + 16)
        largest[columns], offsets[columns], weights[columns] = most, others, 0
    weights[np.arange(WIDTH), rng.permuted(np.tile(np.arange(ROWS), (16, 1)), axis=1).reshape(-1)] = 7
    # Row r of x is 6 in column r, and 6 / 256 in column 16 + r, which the weights of small units are for.
    case.inputs[-2] = torch.tensor(1.0)
    small = units < 1
    x = np.hstack([6 * np.eye(ROWS), 6 / 256 * np.eye(ROWS)])
    sizes = np.repeat(np.where(small, 6 / 256, 6), 16)
    units, first_column = units.repeat(16), np.where(small, ROWS, 0).repeat(16)
    scales = (largest / 6 * units * 4 / sizes).astype(ml_dtypes.float8_e4m3fn)
    set_biases(case, first, np.ones(WIDTH), offsets * units * SCALE)
    case.inputs[0][:ROWS, : 2 * ROWS] = torch.from_numpy(x)
    rows, k = case.inputs[first + 3].shape[-1], case.inputs[0].shape[-1]
    every = np.arange(rows // WIDTH - 1, rows, rows // WIDTH)  # of up, not of gate
    packed, block_scales = np.zeros((rows, k), np.uint8), np.zeros((rows, k // 16), np.uint8)
    packed[every[:, None], first_column[:, None] + np.arange(ROWS)] = weights
    block_scales[every, first_column // 16] = scales.view(np.uint8)
    set_up(case, first, packed, block_scales, SCALE / 4)
    values = weights.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales.astype(np.float64)[:, None] * SCALE / 4
    return np.asarray((values * sizes[:, None]).T + float64(case.inputs[first + 3]).reshape(-1)[every])


@pytest.mark.parametrize("make", [gated_mlp, experts, plain_experts])
@pytest.mark.parametrize("scale_search", [0, 1, 2])
def test_scales_of_blocks(
    emulated: PluginHost,
    emulated_gpu: Gpu,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., tuple[str, Case, int, dict[str, float]]],
    scale_search: int,
) -> None:
    """Hidden values without an error, so that of candidates as good as each other too the right one is taken. Those of
    the last row are NaN, whose codes are zero. Every code lies in the workspace."""
    workspaces: list[torch.Tensor] = []
    enqueue = Session.enqueue

    def noted(session: Session, inputs: Any, outputs: Any, workspace: torch.Tensor) -> None:
        workspaces.append(workspace)
        enqueue(session, inputs, outputs, workspace)

    monkeypatch.setattr(Session, "enqueue", noted)
    rng = np.random.default_rng(seed)
    op, case, first, attributes = make(rng, ROWS + 1)
    hidden = of_every_scale(rng, case, first)
    case.inputs[0][ROWS] = torch.nan
    attributes |= {"activation": int(Activation.IDENTITY), "quantize_activations": 1, "scale_search": scale_search}
    expected = quantize(hidden.astype(np.float32), SCALE, scale_search)
    packed = np.vstack([pack(expected.codes), np.zeros((1, WIDTH // 2), np.uint8)])
    for tactic in tactics(emulated_gpu) if op == "NVFP4GatedMLP" else [W4A4]:
        (y,) = run(emulated, op, case.inputs, attributes, tactic, again=False)
        np.testing.assert_allclose(float64(y).reshape(-1, WIDTH)[:ROWS], expected.values, 1e-3, 1e-9)
        assert y.reshape(-1, WIDTH)[ROWS].isnan().all()
        assert packed.tobytes() in workspaces.pop().numpy().tobytes()
