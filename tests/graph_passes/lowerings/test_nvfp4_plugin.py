"""MLPs whose intermediate features are no multiple of 32, as SigLIP's 4304: filled, and the same values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models.graphs import assert_same, mlp_model, quantized_twin, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import filled
from trt_nvfp4.graph_passes.planning.kernels import kernel_class
from trt_nvfp4.plugins.ops import OPS

Load = Callable[..., Any]
THOR = Capabilities("thor", nvfp4_w4a16=True, nvfp4_w4a4=True)


@pytest.mark.parametrize(("features", "expected"), [(4304, 4352), (1008, 1024), (48, 48), (96, 96), (16384, 16384)])
def test_how_many_features_a_plugin_has(features: int, expected: int) -> None:
    assert filled(features) == expected


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["gelu_erf", "silu"])
def test_zeros_fill_the_weights_and_change_nothing(gated: bool, activation: str, loaded: Load, seed: int) -> None:
    model, graph = mlp_model(spec(gated=gated, activation=activation, biases=True, intermediate=1008, seed=seed))
    source = loaded(model)
    plan = plan_all(source)
    result = rewritten(source, plan)
    (node,) = (node for node in onnx.load(result.path).graph.node if node.domain == "trt_nvfp4")
    shapes = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(result.path).graph.initializer}
    names = {formal.name: name for formal, name in zip(OPS[node.op_type].inputs, node.input, strict=True)}
    up, down = (shapes[names[key]] for key in ("gate_up_weight" if gated else "up_weight", "down_weight"))
    assert (up[-2], down[-1]) == (1024 * (2 if gated else 1), 1024 // 2)
    x = np.random.default_rng(seed).standard_normal((2, 3, 32)).astype(np.float32)
    assert_same(result.path, quantized_twin(graph, model), x)


def test_the_kernels_for_tensor_cores_serve_them(loaded: Load, seed: int) -> None:
    (entry,) = plan_all(loaded(mlp_model(spec(dtype="float16", intermediate=1008, seed=seed))[0])).subgraphs
    found = kernel_class(entry, THOR)
    assert found is not None
    assert found.name in ("W4A16", "W4A4")


@pytest.mark.parametrize(("intermediate", "expected"), [(1008, "generic"), (1024, "W4A4")])
def test_a_mixed_mlp_is_not_filled(intermediate: int, expected: str, loaded: Load, seed: int) -> None:
    """Its products are linears: down reads the model's own K."""
    source = loaded(mlp_model(spec(dtype="float16", intermediate=intermediate, seed=seed))[0])
    (entry,) = plan_all(source, calibrated=True).subgraphs
    entry.decision, entry.op = Decision.NVFP4_MIXED, "NVFP4Linear"
    found = kernel_class(entry, THOR)
    assert found is not None
    assert found.name == expected


def test_a_width_that_the_model_does_not_state(loaded: Load, rng: np.random.Generator) -> None:
    """It is stated for TensorRT, which would take the largest that the shape seems to allow."""
    weight = (rng.standard_normal((64, 96)) / 8).astype(np.float32)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2, "n", width]) for name, width in (("x", "k"), ("y", 96)))
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    graph = onnx.helper.make_graph([product], "g", [x], [y], [onnx.numpy_helper.from_array(weight, "w")])
    source = loaded(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10))
    result = rewritten(source, plan_all(source))
    reshape, _ = onnx.load(result.path).graph.node
    assert reshape.op_type == "Reshape"
    given = rng.standard_normal((2, 5, 64)).astype(np.float32)
    (found,) = run(result.path, given)
    assert relative_error(found=[found], expected=[given @ weight]) < 0.2
