"""NVFP4MoE on the GPU, generic, W4A16 and SM90's own W4A16, against float64: routing, skewed loads, every kind of
scoring."""

from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from nvfp4_reference import Array, activate, gated_activate, rounded
from op_inputs import float64
from test_kernels import GENERIC, check_mlp, quantized, require_gpu_of, run

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation

pytestmark = pytest.mark.gpu

W4A16, W4A16_SM90 = 2, 8
OP = OPS["NVFP4MoE"]
NAMES = [formal.name for formal in OP.inputs]
LARGEST = np.finfo(np.float32).max
DEEPSEEK = {"top_k": 4, "scoring": 1, "n_group": 4, "topk_group": 2, "group_score_top": 2, "renormalize": 1}
SCORINGS: list[dict[str, Any]] = [
    {"top_k": 2, "scoring": 0, "renormalize": 1},
    {"top_k": 3, "scoring": 0},
    {**DEEPSEEK, "scaling_factor": 2.5, "shared": 1},
    {"top_k": 4, "scoring": 2},
    {"top_k": 1, "scoring": 3, "scale_input": 1, "shared": 1},
    {"top_k": 3, "scoring": 4, "renormalize": 1, "scaling_factor": 1.5, "shared": 1},
    {"top_k": 5, "scoring": 5, "scaling_factor": 1.5, "shared": 1},
    {"top_k": 2, "shared": 1, "shared_gated": 1},
]


def finite(x: Array) -> Array:
    return np.clip(np.where(np.isnan(x), -LARGEST, x), -LARGEST, LARGEST)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def sqrt_softplus(x: Array) -> Array:
    return np.sqrt(np.logaddexp(0, x))


def route(logits: Array, bias: Array, attributes: dict[str, Any]) -> tuple[np.ndarray, Array]:
    """Experts and weights by rank, in float64."""
    logits = finite(logits)
    scores = {0: softmax, 1: sigmoid, 4: sqrt_softplus}.get(attributes["scoring"], lambda x: x)(logits)
    keys = finite(scores + bias)
    tokens, count = keys.shape
    groups = keys.reshape(tokens, attributes["n_group"], -1)
    group_scores = -np.sort(-groups, -1)[..., : attributes["group_score_top"]].sum(-1)
    best = np.argsort(-group_scores, -1, kind="stable")[:, : attributes["topk_group"]]
    opened = np.zeros(group_scores.shape, bool)
    np.put_along_axis(opened, best, True, -1)
    keys = np.where(opened[..., None], groups, -np.inf).reshape(tokens, count)
    experts = np.argsort(-keys, -1, kind="stable")[:, : attributes["top_k"]]
    weights = np.take_along_axis(scores, experts, -1)
    weights = {2: softmax, 3: sigmoid}.get(attributes["scoring"], lambda x: x)(weights)
    if attributes["scoring"] == 5:
        weights = np.where(weights > -LARGEST, weights, 0)
    if attributes["renormalize"]:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * attributes["scaling_factor"]


def reference(case: op_inputs.Case, attributes: dict[str, Any], dtype: torch.dtype) -> tuple[Array, Array]:
    """y in float64, and the sum of the magnitudes that make it up."""
    named = {name: float64(x) for name, x in zip(NAMES, case.inputs, strict=True) if x.dtype != torch.int8}
    x, w4a4 = named["x"], attributes["quantize_activations"]
    up, down, shared_up, shared_down = (w.values for w in case.weights)

    def hidden_of(rows: Array, weight: Array, bias: Array) -> Array:
        pre = rows @ weight.T + bias
        if attributes["gated"]:
            gate, linear = pre[:, 0::2], pre[:, 1::2]
            return gated_activate(gate, linear, attributes["activation"], attributes["alpha"], attributes["limit"])
        return activate(pre, attributes["activation"])

    def seen(rows: Array) -> Array:
        return quantized(rows) if w4a4 else rounded(rows, dtype)

    experts, weights = route(named["router_logits"], named["correction_bias"], attributes)
    tokens, top_k = experts.shape
    rows = np.repeat(x, top_k, axis=0)
    if attributes["scale_input"]:
        rows = rounded(rows * weights.reshape(-1, 1).astype(np.float32), dtype)
        weights = np.ones_like(weights)
    rows, chosen = seen(rows), experts.reshape(-1)
    hidden = np.concatenate(
        [hidden_of(rows[p : p + 1], up[e], named["gate_up_bias"][e]) for p, e in enumerate(chosen)]
    ).reshape(tokens * top_k, -1)
    hidden = seen(hidden)
    bias = named["down_bias"][chosen]
    outputs = np.einsum("pi,phi->ph", hidden, down[chosen]) + bias
    magnitudes = np.einsum("pi,phi->ph", np.abs(hidden), np.abs(down[chosen])) + np.abs(bias)
    y = np.einsum("tr,trh->th", weights, outputs.reshape(tokens, top_k, -1))
    magnitude = np.einsum("tr,trh->th", np.abs(weights), magnitudes.reshape(tokens, top_k, -1))
    if attributes["shared"]:
        shared = seen(hidden_of(seen(x), shared_up, named["shared_gate_up_bias"]))
        factor = sigmoid(x @ named["shared_gate"])[:, None] if attributes["shared_gated"] else 1.0
        y = y + factor * (shared @ shared_down.T + named["shared_down_bias"])
        magnitude = magnitude + factor * (np.abs(shared) @ np.abs(shared_down).T + np.abs(named["shared_down_bias"]))
    return y, magnitude


def check(
    host: PluginHost, case: op_inputs.Case, attributes: dict[str, Any], dtype: torch.dtype, tactic: int
) -> torch.Tensor:
    require_gpu_of(tactic)
    complete = OP.complete_attributes(**{"alpha": 1.5, "limit": 2.0, **attributes})
    (y,) = run(host, "NVFP4MoE", case.inputs, complete, tactic)
    assert y.shape == case.inputs[0].shape
    expected, magnitude = reference(case, complete, dtype)
    # SM90's kernel sums one token's products in FP16: together with T's rounding 2e-3 at most.
    norm = 1e-3 if len(y) == 1 and tactic == W4A16_SM90 else 1e-5
    # A token whose weights vanish is all zeros.
    check_mlp(y, expected, magnitude + np.finfo(np.float32).tiny, complete["quantize_activations"], norm)
    return y


TACTICS = pytest.mark.parametrize("tactic", [GENERIC, W4A16, W4A16_SM90])
W4A16_TACTICS = pytest.mark.parametrize("tactic", [W4A16, W4A16_SM90])


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize("activation", [3, 7, 8])
@TACTICS
def test_scorings(host: PluginHost, seed: int, tactic: int, activation: int, scoring: dict[str, Any]) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 5, 64, 96, 8, torch.float16, s=160)
    check(host, case, {"activation": activation, **scoring}, torch.float16, tactic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("w4a4", [0, 1])
@pytest.mark.parametrize("scoring", SCORINGS[2:7], ids=str)
def test_generic_types(host: PluginHost, seed: int, dtype: torch.dtype, w4a4: int, scoring: dict[str, Any]) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 7, 48, 80, 8, dtype, s=16)
    check(host, case, {"quantize_activations": w4a4, **scoring}, dtype, GENERIC)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 2, 8, 9, 17, 33, 64, 65, 200])
@pytest.mark.parametrize(("h", "i", "experts", "top_k"), [(288, 544, 16, 4), (32, 32, 3, 1), (1056, 32, 12, 8)])
@W4A16_TACTICS
def test_w4a16_shapes(
    host: PluginHost, seed: int, tactic: int, dtype: torch.dtype, m: int, h: int, i: int, experts: int, top_k: int
) -> None:
    """Widths that are no multiple of a tile or a chunk; several jobs an expert; more tokens than a job takes."""
    case = op_inputs.moe(np.random.default_rng(seed), m, h, i, experts, dtype, s=96)
    check(host, case, {"top_k": top_k, "shared": 1, "renormalize": 1}, dtype, tactic)


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
@W4A16_TACTICS
def test_w4a16_activations(host: PluginHost, seed: int, tactic: int, gated: int, activation: Activation) -> None:
    if activation in GATED_ONLY and not gated:
        pytest.skip("needs a gate")
    case = op_inputs.moe(np.random.default_rng(seed), 9, 64, 608, 4, torch.bfloat16, gated=gated)
    check(host, case, {"top_k": 2, "gated": gated, "activation": activation}, torch.bfloat16, tactic)


@pytest.mark.parametrize("m", [1, 9])
def test_sm90_takes_a_mixture_of_many_tiles(host: PluginHost, seed: int, m: int) -> None:
    """AUTO's tactic is SM90's kernel: the same bits as that, run after run, and as the float64 reference has it."""
    case = op_inputs.moe(np.random.default_rng(seed), m, 256, 8224, 8, torch.bfloat16)
    ys = [check(host, case, {"top_k": 4}, torch.bfloat16, tactic) for tactic in (W4A16, W4A16_SM90, W4A16_SM90)]
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[1], ys[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("m", "h", "i", "attributes"),
    [
        (1, 2080, 1056, {"top_k": 2, "activation": 7}),  # tiles of nine chunks, one or two a block
        (8, 1056, 544, {"top_k": 2, "shared": 1, "shared_gated": 1}),
        (1, 800, 9248, {"top_k": 1, "shared": 1, "renormalize": 1}),  # a tile and some for a block
        (3, 544, 1120, {"top_k": 3, "gated": 0, "activation": 4}),
        (1, 8480, 64, {"top_k": 1}),  # a tile for 34 blocks
    ],
    ids=str,
)
def test_blocks_share_tiles_evenly(
    host: PluginHost, seed: int, m: int, h: int, i: int, attributes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Where there are few more tiles than SMs, or fewer: the same bits, run after run."""
    gated = attributes.get("gated", 1)
    case = op_inputs.moe(np.random.default_rng(seed), m, h, i, 8, dtype, s=i, gated=gated)
    ys = [check(host, case, attributes, dtype, W4A16_SM90) for _ in range(5)]
    assert all(torch.equal(y, ys[0]) for y in ys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [39, 50, 64, 90, 110, 131])
@pytest.mark.parametrize(
    "attributes",
    [
        {"activation": 7, "shared": 1, "shared_gated": 1},
        {"gated": 0, "activation": 4},
        {"shared": 1, "scale_input": 1, "scoring": 3},
    ],
    ids=str,
)
def test_wide_jobs(host: PluginHost, seed: int, attributes: dict[str, Any], m: int, dtype: torch.dtype) -> None:
    """Experts of 20 to 66 pairs, and what all tokens share: the same bits, run after run."""
    rng = np.random.default_rng(seed)
    case = op_inputs.moe(rng, m, 544, 800, 4, dtype, s=352, gated=attributes.get("gated", 1))
    ys = [check(host, case, {"top_k": 2, **attributes}, dtype, W4A16_SM90) for _ in range(2)]
    assert torch.equal(*ys)


def of_all_sizes(rng: np.random.Generator, m: int, h: int, i: int, experts: int) -> op_inputs.Case:
    """Tokens from 2^-30 to 2^30 without biases, in each a value some 1000 times as large as the others."""
    case = op_inputs.moe(rng, m, h, i, experts, torch.bfloat16, s=96)
    for name, tensor in zip(NAMES, case.inputs, strict=True):
        if name.endswith("bias"):
            tensor.zero_()
    x = case.inputs[0]
    x[torch.arange(m), torch.from_numpy(rng.integers(0, h, m))] *= 1024
    x *= torch.from_numpy(2.0 ** rng.integers(-30, 31, (m, 1)))
    return case


@pytest.mark.parametrize("scale_input", [0, 1])
@pytest.mark.parametrize("m", [3, 20, 50, 90])
@W4A16_TACTICS
def test_tokens_of_all_sizes(host: PluginHost, seed: int, tactic: int, m: int, scale_input: int) -> None:
    """BF16 as FP16 times powers of two, of 128 values or, in wide jobs, of a token."""
    case = of_all_sizes(np.random.default_rng(seed), m, 544, 352, 4)
    attributes = {"top_k": 2, "shared": 1, "scoring": 1, "scale_input": scale_input}
    check(host, case, attributes, torch.bfloat16, tactic)


def beyond_half(rng: np.random.Generator, m: int, h: int, i: int, experts: int, gated: int) -> op_inputs.Case:
    """Some groups of 64 hidden values are above 2^16, which FP16 does not have, the others about a quarter of that."""
    case = op_inputs.moe(rng, m, h, i, experts, torch.bfloat16, s=96, gated=gated)
    for name, tensor in zip(NAMES, case.inputs, strict=True):
        if name.endswith("up_bias"):
            rows, factor = tensor.shape[-1], 2 if gated else 1
            groups = rng.integers(7, 9, (*tensor.shape[:-1], rows // factor // 64 + 1)).repeat(64 * factor, -1)
            signs = rng.choice([-1, 1], tensor.shape)
            signs[..., ::factor] = 1  # SiLU and squared ReLU leave little below zero
            tensor.copy_(torch.from_numpy(signs * rng.uniform(1.1, 1.3, tensor.shape) * 2.0 ** groups[..., :rows]))
    return case


#: SiLU's and squared ReLU's.
BEYOND_HALF = pytest.mark.parametrize("attributes", [{"shared": 1}, {"gated": 0, "activation": 2}], ids=str)


@pytest.mark.parametrize("m", [20, 50, 90, 130])
@BEYOND_HALF
@W4A16_TACTICS
def test_hidden_values_beyond_half(
    host: PluginHost, seed: int, tactic: int, attributes: dict[str, Any], m: int
) -> None:
    """BF16 ones, which narrow jobs have as FP16 times a power of two."""
    case = beyond_half(np.random.default_rng(seed), m, 544, 800, 4, attributes.get("gated", 1))
    check(host, case, {"top_k": 2, **attributes}, torch.bfloat16, tactic)


@pytest.mark.parametrize("m", [1, 3, 20, 64])
def test_calls_in_a_row_share_a_workspace(host: PluginHost, seed: int, m: int) -> None:
    """A launch begins before the one that makes the plan has ended: none takes an earlier call's jobs for its own."""
    require_gpu_of(W4A16_SM90)
    rng = np.random.default_rng(seed)
    case = op_inputs.moe(rng, m, 1056, 544, 16, torch.bfloat16, s=544)
    x, _, *tensors = [tensor.cuda() for tensor in case.inputs]
    calls = [[x, op_inputs.router_logits(rng, m, 16).cuda(), *tensors] for _ in range(12)]
    attributes = {"top_k": 2, "shared": 1}
    with host.session("NVFP4MoE", calls[0], attributes, tactic=W4A16_SM90) as session:
        expected = [session.run(inputs)[0] for inputs in calls]
        ys = [torch.empty_like(y) for y in expected]
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs, y in zip(calls, ys, strict=True):
                session.enqueue(inputs, [y], workspace)
        for _ in range(200):
            for y in ys:
                y.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(ys, expected, strict=True))
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_tokens_of_many_tiles(host: PluginHost, seed: int, dtype: torch.dtype) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 8, 64, 2048, 32, dtype)
    check(host, case, {"top_k": 4}, dtype, W4A16_SM90)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@W4A16_TACTICS
def test_neighbouring_experts_rows_stay_out(host: PluginHost, seed: int, tactic: int, dtype: torch.dtype) -> None:
    """Tiles end behind an expert's last row, where the next one's are: of no finite values in FP16."""
    case = op_inputs.moe(np.random.default_rng(seed), 9, 64, 96, 4, dtype)
    case.inputs[1][:] = torch.tensor([100.0, -100, 100, -100])
    expected = check(host, case, {"top_k": 2}, dtype, tactic)
    named = dict(zip(NAMES, case.inputs, strict=True))
    named["gate_up_tensor_scale"][1::2] *= 1e9
    (y,) = run(host, "NVFP4MoE", case.inputs, OP.complete_attributes(top_k=2, alpha=1.5, limit=2.0), tactic)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e4, 1e30])
def test_bfloat16_of_any_magnitude(host: PluginHost, seed: int, factor: float, m: int) -> None:
    """Activations that FP16, in which SM90's kernel multiplies, does not hold."""
    case = op_inputs.moe(np.random.default_rng(seed), m, 288, 96, 4, torch.bfloat16, gated=0)
    case.inputs[0].mul_(factor)
    for name, x in zip(NAMES, case.inputs, strict=True):
        if name.endswith("bias"):
            x.zero_()
    check(host, case, {"top_k": 2, "gated": 0, "activation": 1}, torch.bfloat16, W4A16_SM90)


def test_more_jobs_than_a_grid_s_second_dimension_has_room_for(host: PluginHost, seed: int) -> None:
    """4,198,400 pairs of the generic kernels', which take 64 rows at a time."""
    case = op_inputs.moe(np.random.default_rng(seed), 65600, 32, 16, 64, torch.float32)
    attributes = {"top_k": 64, "activation": Activation.SILU}
    (y,) = run(host, "NVFP4MoE", case.inputs, attributes)
    x, logits, *others = case.inputs
    (expected,) = run(host, "NVFP4MoE", [x[-9:], logits[-9:], *others], attributes)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(y[-9:], expected, rtol=1e-4, atol=1e-4)  # routed by other kernels


@pytest.mark.parametrize("m", [3, 40, 100])
@TACTICS
def test_one_expert_takes_all_tokens_and_others_none(host: PluginHost, seed: int, m: int, tactic: int) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), m, 96, 64, 5, torch.float16)
    case.inputs[2][:] = torch.tensor([0.0, -100, 100, 0, -100])
    check(host, case, {"top_k": 2, "scoring": 1}, torch.float16, tactic)


@TACTICS
def test_logits_that_are_nan_infinite_or_equal(host: PluginHost, seed: int, tactic: int) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 5, 64, 32, 6, torch.float16)
    logits = case.inputs[1]
    logits[0] = torch.nan
    logits[1, 2:4] = torch.tensor([torch.inf, -torch.inf])
    logits[2] = 1.0
    logits[3, 1] = torch.nan
    for scoring in range(6):
        attributes = {"top_k": 3, "scoring": scoring, "renormalize": int(scoring >= 4)}  # these scores are no fractions
        check(host, case, attributes, torch.float16, tactic)


@TACTICS
def test_fewer_experts_given_than_chosen(host: PluginHost, seed: int, tactic: int) -> None:
    rng = np.random.default_rng(seed)
    case = op_inputs.moe(rng, 5, 64, 32, 6, torch.float16, s=32)
    case.inputs[1][:] = op_inputs.given_logits(rng, 5, 6, 3)
    check(host, case, {"top_k": 3, "scoring": 5, "shared": 1}, torch.float16, tactic)


@pytest.mark.parametrize("m", [5, 70])
@pytest.mark.parametrize(("experts", "top_k"), [(1024, 64), (1, 1), (33, 33), (256, 8), (512, 10)])
@W4A16_TACTICS
def test_many_experts(host: PluginHost, seed: int, tactic: int, experts: int, top_k: int, m: int) -> None:
    """All tactics route alike."""
    case = op_inputs.moe(np.random.default_rng(seed), m, 32, 32, experts, torch.float16)
    require_gpu_of(tactic)
    tactics = (GENERIC, tactic)
    ys = [run(host, "NVFP4MoE", case.inputs, {"top_k": top_k, "scoring": 1}, each)[0] for each in tactics]
    torch.testing.assert_close(ys[0].float(), ys[1].float(), rtol=0.02, atol=0.02 * ys[0].abs().max().item())


@pytest.mark.parametrize("m", [260, 600])
@W4A16_TACTICS
def test_tokens_beyond_a_launch(host: PluginHost, seed: int, tactic: int, m: int) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), m, 32, 32, 4, torch.bfloat16, s=32)
    check(host, case, {"top_k": 2, "shared": 1}, torch.bfloat16, tactic)


def test_no_tokens(host: PluginHost, seed: int) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 0, 32, 32, 4, torch.float16)
    assert run(host, "NVFP4MoE", case.inputs, {"top_k": 2}, 0)[0].shape == (0, 32)


@pytest.mark.parametrize("m", [5, 9, 40, 80, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@TACTICS
def test_nan_in_x_reaches_its_token_alone(host: PluginHost, seed: int, tactic: int, dtype: torch.dtype, m: int) -> None:
    """Nor do other blocks wait for it, where hidden values are flags."""
    require_gpu_of(tactic)
    case = op_inputs.moe(np.random.default_rng(seed), m, 64, 64, 4, dtype)
    case.inputs[0][4, 3] = torch.nan
    (y,) = run(host, "NVFP4MoE", case.inputs, {"top_k": 2}, tactic)
    assert y[4].isnan().all()
    assert y[[token for token in range(m) if token != 4]].isfinite().all()


def test_w4a16_refuses_what_it_does_not_serve(host: PluginHost, seed: int) -> None:
    case = op_inputs.moe(np.random.default_rng(seed), 2, 48, 32, 4, torch.float16)
    with pytest.raises(HostError, match="NVFP4MoE: tactic 2 cannot serve this call"):
        run(host, "NVFP4MoE", case.inputs, {"top_k": 2}, W4A16)
