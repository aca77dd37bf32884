"""TensorRT's own NVFP4: what the rewritten model computes in ONNX's reference evaluator, against the same by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onnx_models.graphs import Graph, Spec, mlp_model, spec
from onnx_models.passes import EVERYTHING, rewritten
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.tensorrt_nvfp4 import functions
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.plugins.ops.number_formats import tensor_scale

Load = Callable[..., Any]
NATIVE = replace(EVERYTHING, native_nvfp4=True)
AMAX = 4.0


def native_plan(source: SourceModel, **options: Any) -> Plan:
    return make_plan(
        source, find_subgraphs(source), NATIVE, PlanOptions(precision="native-nvfp4", **{"calibrated": True, **options})
    )


def quantized(x: np.ndarray, scale: torch.Tensor | None = None) -> np.ndarray:
    """x, by blocks of its last axis, as NVFP4 keeps it."""
    return nvfp4.dequantize(*nvfp4.quantize(torch.from_numpy(np.array(x, order="C")), scale)).numpy()


def by_hand(model: onnx.ModelProto, options: Spec, x: np.ndarray) -> np.ndarray:
    """Three products of quantized operands, SiLU between them; weights of a fused projection share one scale."""
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    stored_in_out = options.linear in ("matmul", "gemm", "gemm_scaled")
    alpha, beta = (0.5, 2.0) if options.linear == "gemm_scaled" else (1.0, 1.0)

    def product(values: np.ndarray, name: str) -> np.ndarray:
        weight = weights[name].T if stored_in_out else weights[name]
        bias = beta * weights[f"{name}_bias"] if options.biases else 0.0
        left = quantized(values.astype(np.float32), tensor_scale(torch.tensor(AMAX)))
        return np.asarray(alpha * (left @ quantized(weight).T) + bias)

    if options.fused == "split":
        gate, up = np.split(product(x, "gate_up"), 2, axis=-1)
    else:
        gate, up = product(x, "gate"), product(x, "up")
    return product(gate / (1 + np.exp(-gate)) * up, "down")


@pytest.mark.parametrize(
    "options",
    [
        {"linear": "matmul"},
        {"linear": "transpose", "biases": True},
        {"linear": "gemm", "opset": 23},
        {"linear": "gemm_transposed", "biases": True},
        {"linear": "gemm_scaled", "biases": True},
        {"fused": "split"},
        {"opset": 19},
    ],
    ids=str,
)
def test_values(options: dict[str, Any], loaded: Load, seed: int) -> None:
    chosen = spec(**options, seed=seed)
    model, _ = mlp_model(chosen)
    source = loaded(model)
    plan = native_plan(source)
    (entry,) = plan.subgraphs
    assert entry.decision == "native_nvfp4"
    result = rewritten(source, plan, Statistics(dict.fromkeys(calibration_tensors(plan), AMAX), 1))
    written = onnx.load(result.path)
    products = [node.name for node in written.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert sorted(result.realized[entry.name]) == sorted(products)
    assert result.weights_bytes_after < result.weights_bytes_before / 5
    rows = (5,) if chosen.linear.startswith("gemm") else (2, 3)
    x = np.random.default_rng(seed).standard_normal((*rows, 32)).astype(np.float32)
    (found,) = ReferenceEvaluator(written).run(None, {"x": x})
    # The hidden values' sums differ in order, and one of them may round to another neighbour.
    assert np.linalg.norm(found - by_hand(model, chosen, x)) <= 0.02 * np.linalg.norm(found)


def test_quantization_bit_by_bit(seed: int) -> None:
    """The function of TRT_FP4DynamicQuantize against the number format; one block is empty, one saturates its scale."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, 64)) * np.exp(rng.standard_normal((3, 64)))).astype(np.float32)
    x[0, :16], x[1, :16] = 0, 1e4
    scale = tensor_scale(torch.tensor(AMAX))
    model = onnx.parser.parse_model("""<ir_version: 11, opset_import: ["": 23, "trt": 1]>
        g (float[m, k] x, float scale) => (float4e2m1[m, k] v, float8e4m3fn[m, b] s) {
            v, s = trt.TRT_FP4DynamicQuantize<axis = -1, block_size = 16, scale_type = 17>(x, scale)
        }""")
    model.functions.extend(functions())
    onnx.checker.check_model(model)
    values, scales = ReferenceEvaluator(model).run(None, {"x": x, "scale": scale.numpy()})
    packed, expected, _ = nvfp4.quantize(torch.from_numpy(x), scale)
    assert np.array_equal(scales.view(np.uint8), expected.view(torch.uint8).numpy())
    found = nvfp4.dequantize(packed, torch.ones(expected.shape).to(torch.float8_e4m3fn), 1.0)
    assert np.array_equal(values.astype(np.float32), found.numpy())


def test_inputs_that_are_shared_are_quantized_once(loaded: Load, seed: int) -> None:
    source = loaded(mlp_model(spec(seed=seed))[0])
    plan = native_plan(source)
    result = rewritten(source, plan, Statistics(dict.fromkeys(calibration_tensors(plan), AMAX), 1))
    kinds = [node.op_type for node in onnx.load(result.path, load_external_data=False).graph.node]
    assert kinds.count("TRT_FP4DynamicQuantize") == 2, "gate and up read the same"


def test_no_statistics(loaded: Load, seed: int) -> None:
    source = loaded(mlp_model(spec(seed=seed))[0])
    plan = native_plan(source)
    zeros = Statistics(dict.fromkeys(calibration_tensors(plan), 0.0), 1)
    for statistics, found in ((None, "none"), (zeros, "only zeros")):
        expected = rf"TensorRT's own NVFP4 scales activations by .* there are {found} of .*--calib-data"
        with pytest.raises(CalibrationError, match=expected):
            rewritten(source, plan, statistics)


@pytest.mark.parametrize(
    ("options", "reason"), [({"k": 24}, "multiple of 16"), ({"opset": 21}, "does not compute native_nvfp4")]
)
def test_what_it_does_not_serve_goes_on_to_fp8(options: dict[str, Any], reason: str, loaded: Load, seed: int) -> None:
    source = loaded(mlp_model(spec(**options, seed=seed))[0])
    capabilities = NATIVE if "k" in options else EVERYTHING
    plan = make_plan(
        source,
        find_subgraphs(source),
        capabilities,
        PlanOptions(precision="native-nvfp4", kinds=ALL_KINDS, calibrated=True),
    )
    (entry,) = plan.subgraphs
    assert entry.decision == "fp8"
    assert reason in entry.reason


def test_inputs_of_four_dimensions_go_on_to_fp8(loaded: Load, seed: int) -> None:
    graph = Graph(spec(seed=seed))
    graph.mlp("x", "y")
    source = loaded(graph.model(["y"], rank=4))
    plan = make_plan(
        source, find_subgraphs(source), NATIVE, PlanOptions(precision="native-nvfp4", kinds=ALL_KINDS, calibrated=True)
    )
    (entry,) = plan.subgraphs
    assert entry.decision == "fp8"
    assert "tensors of rank 2 or 3 to NVFP4: 'x' has 4" in entry.reason
