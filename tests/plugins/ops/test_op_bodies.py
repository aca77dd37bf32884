"""The ONNX function bodies, run by ONNX Runtime and the reference evaluator, against the Torch references."""

from typing import Any

import pytest
import torch
from op_bodies import DTYPES, RUNNERS, Inputs, activations_of, assert_agrees, model_of, onnxruntime_outputs

from trt_nvfp4.plugins.ops import GATED_ONLY, OPS, Activation
from trt_nvfp4.plugins.ops.definition import ACTIVATION_SCALES

UNGATED = [a for a in Activation if a not in GATED_ONLY]
#: Those whose outputs' rows follow from rows of their inputs; others: test_cached_attention.py, test_nvfp4_decoder.py.
BY_ROWS = [op for op in OPS if op not in ("CachedAttention", "NVFP4Decoder", "NVFP4MoEDecoder")]
LEADS = [(), (5,), (2, 3), (2, 1, 3)]


@RUNNERS
@pytest.mark.parametrize("activation", UNGATED, ids=lambda a: a.name)
def test_linear_activations(runner: Any, activation: Activation, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).linear((7,), 40, 48)
    assert_agrees("NVFP4Linear", tensors, runner, activation=int(activation))


@RUNNERS
@DTYPES
@pytest.mark.parametrize("quantize_activations", [0, 1])
def test_linear_types(runner: Any, dtype: torch.dtype, quantize_activations: int, seed: int) -> None:
    tensors = Inputs(seed, dtype).linear((3, 5), 130, 80)
    assert_agrees("NVFP4Linear", tensors, runner, activation=3, quantize_activations=quantize_activations)


@RUNNERS
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (128, 64), (257, 80)])
def test_linear_shapes(runner: Any, lead: tuple[int, ...], n: int, k: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).linear(lead, n, k)
    assert_agrees("NVFP4Linear", tensors, runner, activation=0, quantize_activations=1)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 10.0])
def test_linear_with_a_given_input_scale(scale: float, seed: int) -> None:
    """Too small a scale saturates, too large a one falls to subnormal block scales: body and reference alike."""
    tensors = Inputs(seed, torch.float32).linear((6,), 32, 96, scale)
    assert_agrees("NVFP4Linear", tensors, onnxruntime_outputs, quantize_activations=1)
    with_computed = OPS["NVFP4Linear"].reference(*tensors[:-1], torch.tensor(0.0), quantize_activations=1)
    assert not torch.equal(OPS["NVFP4Linear"].reference(*tensors, quantize_activations=1), with_computed)


@RUNNERS
@pytest.mark.parametrize("quantize_activations", [0, 1])
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_gated_mlp_activations(runner: Any, activation: Activation, quantize_activations: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).gated_mlp((5,), 48, 80, 24)
    attributes = {"activation": int(activation), "alpha": 1.5, "limit": 0.75}
    assert_agrees("NVFP4GatedMLP", tensors, runner, quantize_activations=quantize_activations, **attributes)


@RUNNERS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the evaluator
@pytest.mark.parametrize("gate_or_up", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name)
def test_nan_goes_through_activations(runner: Any, activation: Activation, gate_or_up: int, seed: int) -> None:
    """Those that clamp, too."""
    tensors = Inputs(seed, torch.float32).gated_mlp((3,), 32, 48, 32)
    tensors[4][10 + gate_or_up] = torch.nan
    attributes = {"activation": int(activation), "limit": 1.0}
    expected = OPS["NVFP4GatedMLP"].reference(*tensors, **attributes)
    assert isinstance(expected, torch.Tensor)
    assert expected.isnan().all()
    (y,) = runner(model_of("NVFP4GatedMLP", tensors, **attributes), tensors)
    assert y.isnan().all()


@RUNNERS
@DTYPES
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_gated_mlp_types_and_shapes(runner: Any, dtype: torch.dtype, lead: tuple[int, ...], seed: int) -> None:
    tensors = Inputs(seed, dtype).gated_mlp(lead, 32, 144, 130)
    assert_agrees("NVFP4GatedMLP", tensors, runner, activation=int(Activation.GELU_TANH))


def test_gated_mlp_interleaves_gate_and_up(seed: int) -> None:
    """Against separate projections: row 2i is gate i, row 2i+1 is up i."""
    inputs = Inputs(seed, torch.float32)
    tensors = inputs.gated_mlp((4,), 32, 48, 32)
    weight, scales, scale, bias = tensors[1:5]
    gate_up = OPS["NVFP4Linear"].reference(tensors[0], weight, scales, scale, bias, torch.tensor(0.0))
    hidden = torch.nn.functional.silu(gate_up[:, ::2]) * gate_up[:, 1::2]
    expected = OPS["NVFP4Linear"].reference(hidden, *tensors[5:9], torch.tensor(0.0))
    torch.testing.assert_close(OPS["NVFP4GatedMLP"].reference(*tensors, activation=3), expected)


@RUNNERS
@pytest.mark.parametrize("quantize_activations", [0, 1])
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize(("norm", "residual"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_persistent_mlp_variants(
    runner: Any, norm: int, residual: int, gated: int, quantize_activations: int, seed: int
) -> None:
    tensors = Inputs(seed, torch.float32).persistent_mlp((2, 3), 48, 80, 48, 3, gated)
    attributes = {"norm": norm, "residual": residual, "gated": gated, "quantize_activations": quantize_activations}
    assert_agrees("NVFP4PersistentMLP", tensors, runner, activation=int(Activation.SILU), **attributes)


@RUNNERS
@DTYPES
@pytest.mark.parametrize("activation", GATED_ONLY, ids=lambda a: a.name)
def test_persistent_mlp_types(runner: Any, activation: Activation, dtype: torch.dtype, seed: int) -> None:
    tensors = Inputs(seed, dtype).persistent_mlp((5,), 144, 32, 144, 2, 1)
    assert_agrees("NVFP4PersistentMLP", tensors, runner, activation=int(activation), limit=0.5)


@RUNNERS
def test_persistent_mlp_of_one_plain_layer_may_change_width(runner: Any, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).persistent_mlp((), 32, 64, 48, 1, 0)
    attributes = {"norm": 0, "residual": 0, "gated": 0}
    assert_agrees("NVFP4PersistentMLP", tensors, runner, activation=int(Activation.RELU2), **attributes)


def test_persistent_mlp_equals_gated_mlps_in_a_row(seed: int) -> None:
    tensors = Inputs(seed, torch.float16).persistent_mlp((4,), 32, 48, 32, 2, 1)
    x, _, *per_layer = tensors
    for i in range(2):
        x = OPS["NVFP4GatedMLP"].reference(x, *(tensor[i] for tensor in per_layer), activation=3)
    y = OPS["NVFP4PersistentMLP"].reference(*tensors, activation=3, norm=0, residual=0)
    torch.testing.assert_close(y, x, rtol=0, atol=0)


@RUNNERS
@DTYPES
@pytest.mark.parametrize(("norm", "add_residual"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_quantize_variants(runner: Any, dtype: torch.dtype, norm: int, add_residual: int, seed: int) -> None:
    """The RMSNorm of body and reference may differ by an ulp, so that codes are compared where there is none."""
    tensors = Inputs(seed, dtype).quantize((3, 5), 80)
    if not norm:
        assert_agrees("NVFP4Quantize", tensors, runner, norm=norm, add_residual=add_residual)
        return
    attributes = {"norm": norm, "add_residual": add_residual, "epsilon": 0.1}
    packed, blocks, scale, residual = OPS["NVFP4Quantize"].reference(*tensors, **attributes)
    found = runner(model_of("NVFP4Quantize", tensors, **attributes), tensors)
    assert (found[0] != packed).double().mean() < 0.02
    assert (found[1] != blocks).double().mean() < 0.02
    torch.testing.assert_close(found[2], scale.double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(found[3], residual.double(), rtol=0, atol=0)


@RUNNERS
@pytest.mark.parametrize(("lead", "k"), [((), 16), ((129,), 16), ((2, 70), 80), ((1, 2, 3), 144)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_quantize_shapes_and_given_scales(runner: Any, lead: tuple[int, ...], k: int, scale: float, seed: int) -> None:
    assert_agrees("NVFP4Quantize", Inputs(seed, torch.float32).quantize(lead, k, scale), runner)


@RUNNERS
def test_quantize_rounds_as_the_format_does_at_every_tie(runner: Any) -> None:
    """Block scales at and beside E4M3's ties and powers of two; values at E2M1's ties; a zero and a tiny block."""
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    row = torch.tensor(midpoints + [-m for m in midpoints])
    steps = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.cat([steps, (steps[1:] + steps[:-1]) / 2, torch.exp2(torch.arange(-9.0, 9.0))])
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    scales = torch.cat([scales, torch.nextafter(scales, up), torch.nextafter(scales, down), torch.tensor([1e-6, 600])])
    x = scales[:, None] * row
    tensors = [x, torch.zeros_like(x), torch.ones(16), torch.tensor(1.0)]
    assert_agrees("NVFP4Quantize", tensors, runner)


@RUNNERS
@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 2.0**-120, 1e30])
def test_quantize_of_zero_tiny_and_huge_activations(runner: Any, magnitude: float, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).quantize((4,), 32)
    tensors[0] *= magnitude
    tensors[0][1] = 0.0
    expected = OPS["NVFP4Quantize"].reference(*tensors)
    found = runner(model_of("NVFP4Quantize", tensors), tensors)
    if magnitude == 0.0 or magnitude > 2.0**-126:  # runtimes may flush subnormal inputs
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted.double(), rtol=1e-6, atol=0)
    assert all(actual.isfinite().all() for actual in found)


@RUNNERS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the evaluator
@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["computed", "given"])
@pytest.mark.parametrize("special", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("op", BY_ROWS)
def test_nan_and_infinity_go_through_quantization(
    runner: Any, op: str, special: float, scale: float, seed: int
) -> None:
    """As a half-precision overflow or a row that is masked out brings them. Never an error of the runtime's."""
    tensors = Inputs(seed, torch.float32).small(op)
    for i, formal in enumerate(OPS[op].inputs):
        if formal.name in (*ACTIVATION_SCALES, "tensor_scale"):
            tensors[i] = torch.full_like(tensors[i], scale)
    tensors[0][1, 5] = special
    attributes = {"quantize_activations": 1} if "quantize_activations" in OPS[op].attributes else {}
    expected = OPS[op].reference(*tensors, **attributes)
    found = runner(model_of(op, tensors, **attributes), tensors)
    if op == "NVFP4Quantize":
        assert torch.equal(found[0], expected[0].double())
        scales = [blocks.to(torch.int8).view(torch.float8_e4m3fn).float().abs() for blocks in (found[1], expected[1])]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)  # the sign of NaN says nothing
        assert torch.equal(found[2].isfinite(), expected[2].isfinite())
    else:
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found[0].isnan(), expected.isnan())
        assert expected.isnan().any() or (special == torch.inf and scale != 0.0)


@RUNNERS
@pytest.mark.parametrize("lead", [(0,), (0, 3)], ids=str)
@pytest.mark.parametrize("op", BY_ROWS)
def test_no_tokens(op: str, lead: tuple[int, ...], runner: Any, seed: int) -> None:
    """As an expert has them that nothing is routed to: the kernels return early, and the rest has nothing to say."""
    tensors = Inputs(seed, torch.float32).small(op)
    for i in range(activations_of(op)):
        tensors[i] = tensors[i].new_empty(*lead, tensors[i].shape[-1])
    attributes = {"quantize_activations": 1} if "quantize_activations" in OPS[op].attributes else {}
    expected = OPS[op].reference(*tensors, **attributes)
    shapes = OPS[op].output_shapes([tuple(tensor.shape) for tensor in tensors], **attributes)
    assert [tuple(y.shape) for y in (expected if isinstance(expected, tuple) else (expected,))] == shapes
    assert [tuple(y.shape) for y in runner(model_of(op, tensors, **attributes), tensors)] == shapes


@pytest.mark.parametrize("opset", [17, 18, 21, 24])  # in which operators of the bodies changed
@pytest.mark.parametrize("op", BY_ROWS)
def test_models_of_opset_17_to_24_carry_the_functions(op: str, opset: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).small(op)
    attributes = {"quantize_activations": 1} if "quantize_activations" in OPS[op].attributes else {}
    assert_agrees(op, tensors, onnxruntime_outputs, opset, **attributes)


@pytest.mark.parametrize(("dtype", "quantize_activations"), [(torch.float16, 0), (torch.bfloat16, 1)])
@pytest.mark.parametrize("op", BY_ROWS)
def test_tensorrt_rtx_takes_the_bodies(op: str, dtype: torch.dtype, quantize_activations: int, seed: int) -> None:
    """It parses every body, inlined, and builds all but the loops over layers and experts (see function_body)."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    tensors = Inputs(seed, dtype).small(op)
    attributes = {"quantize_activations": quantize_activations, "norm": 1}
    attributes = {name: value for name, value in attributes.items() if name in OPS[op].attributes}
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model_of(op, tensors, **attributes).SerializeToString())
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert network.num_outputs == len(OPS[op].outputs)
    assert network.get_output(0).shape[-1] == OPS[op].output_shapes([tuple(t.shape) for t in tensors])[0][-1]
    if op in ("NVFP4PersistentMLP", "NVFP4MoE", "FP8MoE"):
        return
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        shape = (3, *tuple(network.get_input(i).shape)[1:])
        profile.set_shape(network.get_input(i).name, shape, shape, shape)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
