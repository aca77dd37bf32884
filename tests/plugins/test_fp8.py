"""FP8GatedMLP on the GPU, through the plugin's whole life in the plugin host: generic kernels, tensor cores."""

import numpy as np
import op_inputs
import pytest
import torch
from op_inputs import Case
from test_kernels import GENERIC, require_fp8_tensor_cores, run

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.activation import gate

pytestmark = pytest.mark.gpu

AUTO, FP8 = 0, 5
#: Of E4M3's largest value where inputs are near one; the hidden scale is measured.
INPUT_SCALE = 4 / 448


def expected(case: Case, **attributes: int | float) -> torch.Tensor:
    """The op's reference, in float64 but for its roundings."""
    x, up, up_scale, up_bias, down, down_scale, down_bias, input_scale, hidden_scale = (t.cuda() for t in case.inputs)

    def seen(values: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        # By a tensor: Torch on a GPU multiplies by the reciprocal of a number.
        scale = given if given != 0 else values.abs().amax().float() / torch.tensor(448.0, device=values.device)
        return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()

    def weight(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return values.view(torch.float8_e4m3fn).double() * scale.double()[:, None]

    both = seen(x, input_scale) @ weight(up, up_scale).T + up_bias.double()
    kind = Activation(int(attributes["activation"]))
    hidden = gate(kind, both[:, 0::2], both[:, 1::2], float(attributes["alpha"]), float(attributes["limit"]))
    return seen(hidden, hidden_scale) @ weight(down, down_scale).T + down_bias.double()


def assert_close(y: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(y).all()
    error = (y.double() - reference).norm() / reference.norm().clamp_min(1e-30)
    assert error <= tolerance + torch.finfo(y.dtype).eps, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_generic(host: PluginHost, seed: int, dtype: torch.dtype, activation: Activation) -> None:
    for m, k, i, h in ((0, 16, 16, 1), (3, 48, 80, 33), (70, 272, 144, 130)):
        case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), m, k, i, h, dtype)
        attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
        (y,) = run(host, "FP8GatedMLP", case.inputs, attributes)
        if m:
            # Sums that round differently and meet a rounding boundary of E4M3.
            assert_close(y, expected(case, **attributes), 3e-3)


@pytest.fixture
def tensor_cores() -> None:
    require_fp8_tensor_cores("FP8GatedMLP")


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("k", "i", "h"), [(16, 16, 8), (48, 80, 72), (272, 208, 144), (2048, 1040, 264), (128, 4096, 2048)]
)
def test_tensor_cores(host: PluginHost, seed: int, dtype: torch.dtype, k: int, i: int, h: int) -> None:
    rng = np.random.default_rng(seed)
    for m in (1, 2, 15, 64, 65, 128, 129, 200, 257, 300, 600, 968):
        for given in (False, True):
            case = op_inputs.fp8_gated_mlp(rng, m, k, i, h, dtype, (INPUT_SCALE, 4 / 448) if given else (0, 0))
            attributes = {"activation": int(Activation.GELU_TANH), "alpha": 1.0, "limit": 1.0}
            (y,) = run(host, "FP8GatedMLP", case.inputs, {**attributes, "static_scales": int(given)}, FP8)
            # Fast accumulation keeps about 14 bits of a product, and E4M3 turns what crosses a boundary into 1/16.
            assert_close(y, expected(case, **attributes), 2e-2)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("m", [3, 64, 100, 190, 250])
def test_split_k(host: PluginHost, seed: int, m: int) -> None:
    """A long K of the down GEMM: the last split to arrive adds all up."""
    case = op_inputs.fp8_gated_mlp(
        np.random.default_rng(seed), m, 64, 16384, 264, torch.bfloat16, (INPUT_SCALE, 4 / 448)
    )
    attributes = {"activation": int(Activation.SILU), "alpha": 1.5, "limit": 2.0}
    (y,) = run(host, "FP8GatedMLP", case.inputs, attributes | {"static_scales": 1}, FP8)
    assert_close(y, expected(case, **attributes), 2e-2)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_activations_on_tensor_cores(host: PluginHost, seed: int, activation: Activation) -> None:
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), 70, 272, 144, 136, torch.float16)
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 2.0}
    for tactic in (AUTO, FP8):
        (y,) = run(host, "FP8GatedMLP", case.inputs, attributes, tactic)
        assert_close(y, expected(case, **attributes), 2e-2)


@pytest.mark.usefixtures("tensor_cores")
def test_not_a_number_is_kept(host: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), 5, 48, 80, 72, torch.float16, (INPUT_SCALE, 0.01))
    case.inputs[0][3, 7] = float("nan")
    for tactic in (GENERIC, FP8):
        (y,) = run(host, "FP8GatedMLP", case.inputs, {"activation": 3}, tactic)
        assert torch.isnan(y[3]).all()
        assert torch.isfinite(y[[0, 1, 2, 4]]).all()


@pytest.mark.usefixtures("tensor_cores")
def test_what_tensor_cores_do_not_serve(host: PluginHost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype, h in ((torch.float32, 72), (torch.float16, 33)):
        inputs = op_inputs.fp8_gated_mlp(rng, 3, 48, 80, h, dtype).inputs
        with pytest.raises(HostError, match="tactic 5 cannot serve"):
            run(host, "FP8GatedMLP", inputs, {}, FP8)
        generic, automatic = (run(host, "FP8GatedMLP", inputs, {}, tactic)[0] for tactic in (GENERIC, AUTO))
        assert torch.equal(generic, automatic)


def test_reference_agrees(host: PluginHost, seed: int) -> None:
    case = op_inputs.fp8_gated_mlp(np.random.default_rng(seed), 9, 48, 80, 33, torch.float32)
    (y,) = run(host, "FP8GatedMLP", case.inputs, {"activation": 3})
    reference = OPS["FP8GatedMLP"].reference(*case.inputs, activation=3)
    assert isinstance(reference, torch.Tensor)
    assert_close(y.cpu(), reference.double(), 3e-3)
