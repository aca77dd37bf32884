"""The ONNX function bodies, run by ONNX Runtime and the reference evaluator, against the Torch references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from trt_nvfp4.plugins.ops import DOMAIN, OPS, Activation
from trt_nvfp4.plugins.ops.number_formats import pack, quantize_blocks, tensor_scale, tile_scales

TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.int8: TensorProto.INT8,
}
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}  # of the largest output: 1 ulp and rounding


class Inputs:
    """Random inputs of the ops, reproducible by seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def weight(self, n: int, k: int, layers: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Packed weights, tiled scales, tensor scale, each with a leading dimension if there are layers."""
        matrices = [torch.randn(n, k, generator=self.generator) / k**0.5 for _ in range(layers or 1)]
        scales = [tensor_scale(matrix.abs().max()) for matrix in matrices]
        quantized = [quantize_blocks(matrix, scale) for matrix, scale in zip(matrices, scales, strict=True)]
        packed = torch.stack([pack(codes).view(torch.int8) for codes, _ in quantized])
        tiled = torch.stack([tile_scales(blocks).view(torch.int8) for _, blocks in quantized])
        stacked = torch.stack(scales)
        return (packed, tiled, stacked) if layers else (packed[0], tiled[0], stacked[0])

    def linear(self, lead: Sequence[int], n: int, k: int, scale: float = 0.0) -> list[Tensor]:
        return [self.normal(*lead, k), *self.weight(n, k), self.normal(n), torch.tensor(scale)]

    def gated_mlp(self, lead: Sequence[int], k: int, i: int, h: int, scale: float = 0.0) -> list[Tensor]:
        up, down = self.weight(2 * i, k), self.weight(h, i)
        scales = [torch.tensor(scale), torch.tensor(scale)]
        return [self.normal(*lead, k), *up, self.normal(2 * i), *down, self.normal(h), *scales]

    def persistent_mlp(
        self, lead: Sequence[int], k: int, i: int, h: int, layers: int, gated: int, scale: float = 0.0
    ) -> list[Tensor]:
        n = 2 * i if gated else i
        up, down = self.weight(n, k, layers), self.weight(h, i, layers)
        scales = [torch.full((layers,), scale) for _ in range(2)]
        norm_weight = self.normal(layers, k)
        return [
            self.normal(*lead, k), norm_weight, *up, self.normal(layers, n), *down, self.normal(layers, h), *scales
        ]  # fmt: skip

    def quantize(self, lead: Sequence[int], k: int, scale: float = 0.0) -> list[Tensor]:
        return [self.normal(*lead, k), self.normal(*lead, k), self.normal(k), torch.tensor(scale)]


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))


def model_of(op: str, tensors: Sequence[Tensor], opset: int = 21, /, **attributes: Any) -> onnx.ModelProto:
    """A model of one node that carries the op's function; activations are inputs with a free first dimension."""
    definition = OPS[op]
    names = [formal.name for formal in definition.inputs]
    outputs = [formal.name for formal in definition.outputs]
    node = definition.node(names, outputs, "node", **attributes)
    activations = 2 if op == "NVFP4Quantize" else 1
    shapes: list[list[Any]] = [list(tensor.shape) for tensor in tensors]
    for shape in shapes[:activations]:
        shape[:-1] = [f"d{i}" for i in range(len(shape) - 1)]
    output_shapes = definition.output_shapes([tuple(shape) for shape in shapes], **attributes)
    output_types = [
        {"T": TYPES[tensors[0].dtype], "tensor(int8)": TensorProto.INT8}.get(formal.type, TensorProto.FLOAT)
        for formal in definition.outputs
    ]
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, TYPES[tensor.dtype], shape)
            for name, tensor, shape in zip(names, tensors, shapes, strict=True)
        ][:activations],
        list(map(helper.make_tensor_value_info, outputs, output_types, output_shapes)),
        [numpy_helper.from_array(to_numpy(t), n) for n, t in zip(names, tensors, strict=True)][activations:],
    )
    model = helper.make_model(
        graph,
        functions=[definition.function(opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def onnxruntime_outputs(model: onnx.ModelProto, tensors: Sequence[Tensor]) -> list[Tensor]:
    """bfloat16 crosses the boundary as float32: ONNX Runtime's NumPy interface has none."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    feeds = {}
    for value, tensor in zip(model.graph.input, tensors, strict=False):
        feeds[value.name] = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if tensors[0].dtype == torch.bfloat16:
        for value in model.graph.input:
            model.graph.node.insert(0, helper.make_node("Cast", [value.name], [f"{value.name}_bf16"], to=16))
            for node in model.graph.node:
                if node.domain == DOMAIN:
                    node.input[:] = [f"{name}_bf16" if name == value.name else name for name in node.input]
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        for value in model.graph.output:
            if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
                model.graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}_float"], to=1))
                value.name = f"{value.name}_float"
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [to_torch(array) for array in session.run(None, feeds)]


def evaluator_outputs(model: onnx.ModelProto, tensors: Sequence[Tensor]) -> list[Tensor]:
    feeds = {value.name: to_numpy(t) for value, t in zip(model.graph.input, tensors, strict=False)}
    return [to_torch(array) for array in ReferenceEvaluator(model).run(None, feeds)]


def assert_agrees(op: str, tensors: Sequence[Tensor], runner: Any, opset: int = 21, /, **attributes: Any) -> None:
    expected = OPS[op].reference(*tensors, **attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = runner(model_of(op, tensors, opset, **attributes), tensors)
    assert expected[0].count_nonzero() > 0
    for formal, found, wanted in zip(OPS[op].outputs, actual, expected, strict=True):
        assert found.shape == wanted.shape, formal.name
        wanted = wanted.double()
        if formal.type == "tensor(int8)":
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda m, n=formal.name: f"{n}: {m}")
        else:
            bound = TOLERANCE[tensors[0].dtype] * max(wanted.abs().max().item(), 1e-30)
            off = (found - wanted).abs().reshape(-1, wanted.shape[-1] if wanted.dim() else 1).amax(-1) > bound
            # The hidden activations differ in their last bit, and may fall on the other side of a tie when quantized.
            assert off.sum() <= (1 if "MLP" in op and attributes.get("quantize_activations") else 0), formal.name
            assert (found - wanted).norm() <= 0.05 * wanted.norm(), formal.name  # quantizing or not differs by 0.1


RUNNERS = pytest.mark.parametrize("runner", [onnxruntime_outputs, evaluator_outputs], ids=["onnxruntime", "evaluator"])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
UNGATED = [a for a in Activation if a is not Activation.SWIGLU_CLAMPED]
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
def test_persistent_mlp_types(runner: Any, dtype: torch.dtype, seed: int) -> None:
    tensors = Inputs(seed, dtype).persistent_mlp((5,), 144, 32, 144, 2, 1)
    assert_agrees("NVFP4PersistentMLP", tensors, runner, activation=int(Activation.SWIGLU_CLAMPED))


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


@pytest.mark.parametrize("opset", range(17, 25))
@pytest.mark.parametrize("op", OPS)
def test_models_of_opset_17_to_24_carry_the_functions(op: str, opset: int, seed: int) -> None:
    inputs = Inputs(seed, torch.float32)
    tensors = {
        "NVFP4Linear": lambda: inputs.linear((3,), 16, 32),
        "NVFP4GatedMLP": lambda: inputs.gated_mlp((3,), 32, 48, 32),
        "NVFP4PersistentMLP": lambda: inputs.persistent_mlp((3,), 32, 48, 32, 2, 1),
        "NVFP4Quantize": lambda: inputs.quantize((3,), 32),
    }[op]()
    attributes = {} if op == "NVFP4Quantize" else {"quantize_activations": 1}
    assert_agrees(op, tensors, onnxruntime_outputs, opset, **attributes)


@pytest.mark.parametrize("quantize_activations", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["NVFP4Linear", "NVFP4GatedMLP", "NVFP4PersistentMLP", "NVFP4Quantize"])
def test_tensorrt_rtx_takes_the_bodies(op: str, dtype: torch.dtype, quantize_activations: int, seed: int) -> None:
    """It parses every body, inlined, and builds all but the loop over layers (see function_body)."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    inputs = Inputs(seed, dtype)
    tensors = {
        "NVFP4Linear": lambda: inputs.linear((3,), 16, 32),
        "NVFP4GatedMLP": lambda: inputs.gated_mlp((3,), 32, 48, 32),
        "NVFP4PersistentMLP": lambda: inputs.persistent_mlp((3,), 32, 48, 32, 2, 1),
        "NVFP4Quantize": lambda: inputs.quantize((3,), 32),
    }[op]()
    attributes = {"norm": 1} if op == "NVFP4Quantize" else {"quantize_activations": quantize_activations}
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(model_of(op, tensors, **attributes).SerializeToString())
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    assert network.num_outputs == len(OPS[op].outputs)
    assert network.get_output(0).shape[-1] == OPS[op].output_shapes([tuple(t.shape) for t in tensors])[0][-1]
    if op == "NVFP4PersistentMLP":
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
