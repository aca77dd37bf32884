"""Gated MLPs as FP8 plugin nodes: chosen where the target has kernels for them, and the same values as FP8 by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models.graphs import draw, mlp_model, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.plan import PlanError
from trt_nvfp4.graph_passes.rewrite import calibration_tensors

Load = Callable[..., Any]
HOPPER = Capabilities("h200", nvfp4_w4a16=True, fp8=True, fp8_plugins=True)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_transposed"])
def test_values(linear: str, calibrated: bool, loaded: Load, seed: int) -> None:
    model, _ = mlp_model(spec(linear=linear, biases=True, seed=seed))
    source = loaded(model)
    plan = plan_all(source, precision="fp8", calibrated=calibrated)
    (entry,) = plan.subgraphs
    assert entry.op == ""  # Q/DQ nodes, unless the plan says otherwise
    entry.op = "FP8GatedMLP"
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 50.0), 1) if calibrated else None
    result = rewritten(source, plan, statistics)
    onnx.checker.check_model(result.path)
    written = onnx.load(result.path)
    (node,) = (node for node in written.graph.node if node.domain == "trt_nvfp4")
    assert result.realized == {entry.name: [node.name]} == {entry.name: [entry.name]}
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["static_scales"] == int(calibrated)
    x = draw(seed, *((5,) if linear.startswith("gemm") else (2, 3)), 32)
    (expected,), (found,) = run(model, x), run(result.path, x)
    # Three roundings to four bits each; a scale or a row in the wrong place gives errors near one.
    assert np.linalg.norm(found - expected) <= 0.15 * np.linalg.norm(expected)


def test_only_where_the_target_has_kernels(loaded: Load, seed: int) -> None:
    model, _ = mlp_model(spec(seed=seed))
    source = loaded(model)
    for capabilities in (HOPPER, Capabilities("ada", fp8=True)):
        plan = make_plan(source, find_subgraphs(source), capabilities, PlanOptions(precision="fp8"))
        assert [(entry.decision, entry.op) for entry in plan.subgraphs] == [("fp8", "")], "float32 has none"


def test_an_op_left_from_another_decision_means_qdq_nodes(loaded: Load, seed: int) -> None:
    source = loaded(mlp_model(spec(seed=seed))[0])
    plan = plan_all(source)
    assert plan.subgraphs[0].op.startswith("NVFP4")
    plan.subgraphs[0].decision = "fp8"
    result = rewritten(source, plan)
    kinds = {node.op_type for node in onnx.load(result.path, load_external_data=False).graph.node}
    assert {"DequantizeLinear", "MatMul"} <= kinds
    assert "FP8GatedMLP" not in kinds


def test_an_op_that_cannot_serve_is_refused(loaded: Load, seed: int) -> None:
    source = loaded(mlp_model(spec(gated=False, seed=seed))[0])
    plan = plan_all(source, precision="fp8")
    plan.subgraphs[0].op = "FP8GatedMLP"
    with pytest.raises(PlanError, match="cannot be fp8: fp8 computes moe, gated_mlp, and this is of kind mlp"):
        plan.check(source)
