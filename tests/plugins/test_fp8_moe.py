"""FP8MoE on the GPU, through the plugin's whole life in the plugin host: generic kernels, tensor cores."""

from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from op_inputs import Case, float64
from test_fp8 import AUTO, FP8, INPUT_SCALE, assert_close
from test_kernels import GENERIC, require_fp8_tensor_cores, run
from test_moe import DEEPSEEK, SCORINGS, route

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation
from trt_nvfp4.plugins.ops.activation import activate, gate

pytestmark = pytest.mark.gpu

OP = OPS["FP8MoE"]
NAMES = [formal.name for formal in OP.inputs]
SCALES = (INPUT_SCALE, 4 / 448)


def expected(case: Case, attributes: dict[str, Any]) -> torch.Tensor:
    """The op in float64 but for its roundings, pair by pair."""
    named = dict(zip(NAMES, case.inputs, strict=True))
    kind, x = Activation(attributes["activation"]), named["x"]

    def seen(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = scale if scale != 0 else values.abs().amax().float() / torch.tensor(448.0)
        return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()

    def product(rows: torch.Tensor, projection: str, expert: Any = ...) -> torch.Tensor:
        values, scale, bias = (named[f"{projection}_{part}"][expert] for part in ("weight", "scale", "bias"))
        weight = values.view(torch.float8_e4m3fn).double() * scale.double()[:, None]
        return rows @ weight.T + bias.double()

    def hidden_of(both: torch.Tensor) -> torch.Tensor:
        if not attributes["gated"]:
            return activate(kind, both)
        return gate(kind, both[..., 0::2], both[..., 1::2], attributes["alpha"], attributes["limit"])

    chosen, weights = route(float64(named["router_logits"]), float64(named["correction_bias"]), attributes)
    experts, factors = torch.from_numpy(chosen).flatten(), torch.from_numpy(weights).flatten()
    rows = x.repeat_interleave(chosen.shape[1], 0)
    if attributes["scale_input"]:
        rows, factors = (rows.float() * factors.float()[:, None]).to(x.dtype), torch.ones_like(factors)
    rows = seen(rows, named["input_scale"])
    hidden = torch.stack([hidden_of(product(row, "gate_up", e)) for row, e in zip(rows, experts, strict=True)])
    hidden = seen(hidden, named["hidden_scale"])
    outputs = torch.stack([product(row, "down", e) for row, e in zip(hidden, experts, strict=True)])
    y = (factors[:, None] * outputs).reshape(*chosen.shape, -1).sum(1)
    if attributes["shared"]:
        shared = hidden_of(product(seen(x, named["input_scale"]), "shared_gate_up"))
        shared = product(seen(shared, named["hidden_scale"]), "shared_down")
        if attributes["shared_gated"]:
            shared = shared * (x.double() @ named["shared_gate"].double()).sigmoid()[:, None]
        y = y + shared
    return y


def check(
    host: PluginHost, case: Case, attributes: dict[str, Any], tactic: int, tolerance: float = 2e-2
) -> torch.Tensor:
    complete = OP.complete_attributes(**{"alpha": 1.5, "limit": 2.0, **attributes})
    (y,) = run(host, "FP8MoE", case.inputs, complete, tactic)
    assert y.shape == case.inputs[0].shape
    # Fast accumulation keeps about 14 bits of a product, and E4M3 turns what crosses a boundary into 1/16.
    assert_close(y.cpu(), expected(case, complete), tolerance)
    return y


@pytest.fixture
def tensor_cores() -> None:
    require_fp8_tensor_cores("FP8MoE")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_generic(host: PluginHost, seed: int, dtype: torch.dtype, scoring: dict[str, Any]) -> None:
    for m in (1, 7, 70):
        case = op_inputs.fp8_moe(np.random.default_rng(seed), m, 48, 80, 8, dtype, s=32)
        check(host, case, {"activation": 3, **scoring}, GENERIC, 3e-3)


@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_generic_without_a_gate(host: PluginHost, seed: int, activation: Activation) -> None:
    if activation in GATED_ONLY:
        pytest.skip("needs a gate")
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 9, 64, 48, 4, torch.float16, gated=0)
    check(host, case, {"top_k": 2, "gated": 0, "activation": int(activation)}, AUTO, 3e-3)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
def test_scorings(host: PluginHost, seed: int, given: bool, scoring: dict[str, Any]) -> None:
    scales = SCALES if given else (0, 0)
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 5, 64, 96, 8, torch.float16, scales, s=160)
    check(host, case, {"static_scales": int(given), **scoring}, FP8)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("h", "i", "experts", "top_k"), [(16, 16, 3, 1), (272, 208, 16, 4), (1040, 48, 12, 8), (512, 1024, 8, 2)]
)
def test_shapes(host: PluginHost, seed: int, dtype: torch.dtype, h: int, i: int, experts: int, top_k: int) -> None:
    """Widths that are no multiple of a tile; several jobs an expert; tiles of 64 and of 128 rows."""
    rng = np.random.default_rng(seed)
    for m in (1, 2, 15, 64, 65, 128, 200, 257, 300):
        case = op_inputs.fp8_moe(rng, m, h, i, experts, dtype, SCALES, s=96)
        check(host, case, {"top_k": top_k, "shared": 1, "renormalize": 1, "static_scales": 1}, FP8)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_activations(host: PluginHost, seed: int, activation: Activation) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 70, 272, 144, 4, torch.float16)
    check(host, case, {"top_k": 2, "activation": int(activation)}, FP8)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("m", [3, 70, 300])
def test_one_expert_takes_all_tokens_and_others_none(host: PluginHost, seed: int, m: int) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), m, 96, 64, 5, torch.float16)
    case.inputs[2][:] = torch.tensor([0.0, -100, 100, 0, -100])
    check(host, case, {"top_k": 2, "scoring": 1}, FP8)


@pytest.mark.usefixtures("tensor_cores")
def test_nan_in_x_reaches_its_token_alone(host: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 9, 64, 64, 4, torch.float16, SCALES)
    case.inputs[0][4, 3] = torch.nan
    for tactic in (GENERIC, FP8):
        (y,) = run(host, "FP8MoE", case.inputs, {"top_k": 2}, tactic)
        assert y[4].isnan().all()
        assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.usefixtures("tensor_cores")
def test_what_tensor_cores_do_not_serve(host: PluginHost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype, gated in ((torch.float32, 1), (torch.float16, 0)):
        inputs = op_inputs.fp8_moe(rng, 3, 48, 80, 4, dtype, gated=gated).inputs
        with pytest.raises(HostError, match="FP8MoE: tactic 5 cannot serve"):
            run(host, "FP8MoE", inputs, {"top_k": 2, "gated": gated}, FP8)
        generic, automatic = (
            run(host, "FP8MoE", inputs, {"top_k": 2, "gated": gated}, tactic)[0] for tactic in (GENERIC, AUTO)
        )
        assert torch.equal(generic, automatic)


def test_no_tokens(host: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 0, 32, 32, 4, torch.float16)
    assert run(host, "FP8MoE", case.inputs, {"top_k": 2}, AUTO)[0].shape == (0, 32)


def test_reference_agrees(host: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_moe(np.random.default_rng(seed), 9, 48, 80, 8, torch.float32, s=32)
    attributes = {**DEEPSEEK, "scaling_factor": 2.5, "shared": 1, "shared_gated": 1}
    (y,) = run(host, "FP8MoE", case.inputs, attributes)
    reference = OP.reference(*case.inputs, **attributes)
    assert isinstance(reference, torch.Tensor)
    assert_close(y.cpu(), reference.double(), 3e-3)
