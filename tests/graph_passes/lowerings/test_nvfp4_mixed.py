"""MLPs whose gate and up read NVFP4 activations, and whose down reads 16-bit ones: two plugin nodes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnx_models.graphs import Graph, draw, quantized_twin, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import NVFP4_MIXED, NVFP4_W4A4
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import PlanError
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops import number_formats

Load = Callable[..., Any]


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"fused": None, "biases": True}, "max"),
        ({"fused": "split_sizes"}, "max+activation-sweep"),
        ({"fused": "interleaved", "linear": "gemm_transposed"}, "max"),
        ({"gated": False, "biases": True}, "max+activation-four-over-six"),
    ],
)
def test_values(options: dict[str, Any], recipe: str, loaded: Load, seed: int) -> None:
    graph = Graph(spec(**options, k=64, intermediate=80, out=48, seed=seed))
    graph.mlp("x", "y")
    rank = 2 if str(options.get("linear", "")).startswith("gemm") else 3
    model = graph.model(["y"], rank)
    source = loaded(model)
    plan = replace(plan_all(source, calibrated=True), recipe=recipe)
    (entry,) = plan.subgraphs
    entry.decision, entry.op = Decision.NVFP4_MIXED, "NVFP4Linear"
    up_input, down_input = entry.linear_inputs
    assert set(calibration_tensors(plan)) == {up_input, down_input}
    result = rewritten(source, plan, Statistics({up_input: 3.0, down_input: 9.0}, 1))
    onnx.checker.check_model(result.path)
    written = onnx.load(result.path)
    nodes = {node.name: node for node in written.graph.node if node.domain == "trt_nvfp4"}
    assert set(nodes) == set(result.realized[entry.name]) == {f"{entry.name}/up", f"{entry.name}/down"}
    attributes = {
        name.rpartition("/")[2]: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for name, node in nodes.items()
    }
    search = recipes.parse(recipe).scale_search
    assert {k: attributes["up"][k] for k in ("quantize_activations", "scale_search", "static_scales")} == {
        "quantize_activations": 1,
        "scale_search": search,
        "static_scales": 1,
    }
    assert {attributes["down"][k] for k in ("quantize_activations", "scale_search", "static_scales")} == {0}

    # The twin has the same weights in NVFP4; x is rounded before it.
    x = draw(seed, *(2, 3)[: rank - 1], 64)
    scale = number_formats.tensor_scale(torch.tensor(3.0), search)
    rounded = number_formats.dequantize_blocks(
        *number_formats.quantize_blocks(torch.from_numpy(x), scale, search), scale
    ).numpy()
    (expected,), (found,) = run(quantized_twin(graph, model), rounded), run(result.path, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_chain_with_norms_and_residuals(loaded: Load, seed: int) -> None:
    """Merged blocks: two nodes for each; norms and residual adds stay the model's own."""
    graph = Graph(spec(k=32, intermediate=48, out=32, seed=seed))
    graph.mlp(graph.mlp("x", "m", "first_"), "y", "second_")
    model = graph.model(["y"])
    source = loaded(model)
    plan = plan_all(source, calibrated=True)
    for entry in plan.subgraphs:
        entry.decision, entry.op = Decision.NVFP4_MIXED, "NVFP4Linear"
    x = draw(seed, 4, 16, 32)
    result = rewritten(source, plan, collect(source.path, calibration_tensors(plan), [{"x": x}]))
    written = onnx.load(result.path)
    made = [node.name for node in written.graph.node if node.domain == "trt_nvfp4"]
    assert sorted(made) == sorted(name for names in result.realized.values() for name in names)
    assert len(made) == 4
    (expected,), (found,) = run(model, x), run(result.path, x)
    # Roundings to four bits, of six tensors; a scale or a row in the wrong place gives errors near one.
    assert np.linalg.norm(found - expected) <= 0.6 * np.linalg.norm(expected)


def test_what_may_choose_it(loaded: Load, seed: int) -> None:
    """MLPs where the target computes in FP4, between W4A4 and W4A16; a plan for a linear is refused."""
    graph = Graph(spec(k=32, intermediate=48, out=32, seed=seed))
    graph.linear(graph.mlp("x", "m"), "head", 32, 16, "y")
    source = loaded(graph.model(["y"]))
    mlp, linear = sorted(find_subgraphs(source), key=lambda subgraph: subgraph.kind)
    blackwell = Capabilities("b200", nvfp4_w4a4=True, nvfp4_w4a16=True)

    def choices(subgraph: Subgraph, capabilities: Capabilities) -> list[Decision]:
        return kind_of(subgraph).choices(subgraph, Decision.KEEP, capabilities, "auto", "auto")

    assert choices(mlp, blackwell)[:3] == ["nvfp4_w4a4", "nvfp4_mixed", "nvfp4_w4a16"]
    assert Decision.NVFP4_MIXED not in choices(linear, blackwell)
    assert Decision.NVFP4_MIXED not in choices(mlp, Capabilities("h200", nvfp4_w4a16=True))
    plan = plan_all(source, calibrated=True)
    next(entry for entry in plan.subgraphs if entry.kind == "linear").decision = Decision.NVFP4_MIXED
    with pytest.raises(PlanError, match="nvfp4_mixed computes gated_mlp, mlp, and this is of kind linear"):
        plan.check(source)


def test_statistics_of_both_parts() -> None:
    """GPTQ on quantized inputs makes gate and up, on their own ones down."""
    recipe = recipes.parse("local-hessian+gptq+quantized-inputs")
    assert NVFP4_MIXED.needs(recipe) == NVFP4_W4A4.needs(recipe) | {"hessian"}
