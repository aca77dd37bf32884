"""`+residual:R`: heavy channels last in weights and inputs, in every plugin with 4-bit activations."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnx_models.graphs import Graph, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.calibration.recipes import InputStatistics, parse
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.plan import Plan, PlanError
from trt_nvfp4.graph_passes.rewrite import calibration_tensors

Load = Callable[..., Any]
RECIPE = "local-hessian+gptq+activation-sweep+residual:32"


def samples(seed: int, width: int, heavy: slice, count: int = 4) -> list[dict[str, np.ndarray]]:
    """Rows of which some channels are twenty times as large as the others."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((count, 2, 40, width)).astype(np.float32)
    rows[..., heavy] *= 20
    return [{"x": sample} for sample in rows]


def nodes_of(path: Any) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("decision", [Decision.NVFP4_W4A4, Decision.NVFP4_MIXED])
@pytest.mark.parametrize("options", [{"biases": True}, {"fused": "split_sizes"}, {"gated": False, "biases": True}])
def test_mlps(options: dict[str, Any], decision: Decision, loaded: Load, seed: int) -> None:
    graph = Graph(spec(**options, k=64, intermediate=96, out=48, seed=seed))
    graph.mlp("x", "y")
    model = graph.model(["y"])
    source = loaded(model)
    # Every eighth channel is heavy: no block of 16 is spared.
    given = samples(seed, 64, slice(3, None, 8))
    errors = {}
    for recipe in (RECIPE, RECIPE.rpartition("+")[0]):
        plan = replace(plan_all(source, calibrated=True), recipe=recipe)
        (entry,) = plan.subgraphs
        if decision == Decision.NVFP4_MIXED:
            entry.decision, entry.op = decision, "NVFP4Linear"
        statistics = collect(source.path, calibration_tensors(plan), given)
        result = rewritten(source, plan, statistics)
        nodes = nodes_of(result.path)
        plugin = next(node for node in nodes.values() if node.domain == "trt_nvfp4")
        count = next(a.i for a in plugin.attribute if a.name == "residual_channels")
        assert count == parse(recipe).residual
        if count:
            order = next(
                numpy_helper.to_array(t)
                for t in onnx.load(result.path).graph.initializer
                if t.name == nodes[plugin.input[0].removesuffix("/output")].input[1]
            )
            assert sorted(order) == list(range(64))
            assert set(order[-8:]) <= set(order[-count:])
            assert set(range(3, 64, 8)) <= set(order[-count:].tolist())
        x = given[0]["x"]
        (expected,), (found,) = run(model, x), run(result.path, x)
        errors[count] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert errors[32] < 0.9 * errors[0] < 0.25


def test_joined_linears(loaded: Load, seed: int) -> None:
    graph = Graph(spec(k=64, seed=seed))
    graph.linear("x", "q", 64, 32, "y")
    graph.linear("x", "k", 64, 16, "z")
    model = graph.model(["y", "z"])
    source = loaded(model)
    given = samples(seed, 64, slice(3, None, 8))
    plan = replace(plan_all(source, calibrated=True), recipe="mse+residual:32")
    assert set(calibration_tensors(plan).values()) == {frozenset({"mean_square"})}
    result = rewritten(source, plan, collect(source.path, calibration_tensors(plan), given))
    expected, found = run(model, given[0]["x"]), run(result.path, given[0]["x"])
    for wanted, seen in zip(expected, found, strict=True):
        assert np.linalg.norm(seen - wanted) <= 0.13 * np.linalg.norm(wanted)


def test_entries_may_have_their_own(loaded: Load, seed: int, tmp_path: Path) -> None:
    """Through a plan file: none, the recipe's and more than the recipe's; statistics of those alone that have some."""
    graph = Graph(spec(k=64, seed=seed))
    for name, x, y in (("first", "x", "a"), ("second", "a", "b"), ("third", "b", "y")):
        graph.linear(x, name, 64, 64, y)
    source = loaded(graph.model(["y"]))
    plan = replace(plan_all(source, calibrated=True), recipe="mse+residual:32")
    counts = [0, None, 64]
    for entry, count in zip(plan.subgraphs, counts, strict=True):
        entry.residual_channels = count
    plan.save(tmp_path / "plan.yaml")
    plan = Plan.load(tmp_path / "plan.yaml")
    assert [entry.residual_channels for entry in plan.subgraphs] == counts
    wanted = calibration_tensors(plan)
    assert [wanted[entry.input] for entry in plan.subgraphs] == [set(), {"mean_square"}, {"mean_square"}]
    given = samples(seed, 64, slice(0, 4), count=1)
    result = rewritten(source, plan, collect(source.path, wanted, given))
    plugins = [node for node in nodes_of(result.path).values() if node.domain == "trt_nvfp4"]
    assert [a.i for node in plugins for a in node.attribute if a.name == "residual_channels"] == [0, 32, 64]
    (expected,), (found,) = run(source.path, given[0]["x"]), run(result.path, given[0]["x"])
    assert np.linalg.norm(found - expected) < 0.25 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("decision", "count", "why"),
    [
        (Decision.NVFP4_W4A4, 48, "is 48; one of 0, 32, 64"),
        (Decision.NVFP4_W4A4, 64, "a product reads fewer than 64 channels"),
        (Decision.NVFP4_W4A16, 32, "it is nvfp4_w4a16; leave out 'residual_channels'"),
    ],
)
def test_entries_that_cannot_have_them(decision: Decision, count: int, why: str, loaded: Load, seed: int) -> None:
    graph = Graph(spec(k=32, intermediate=96, out=32, seed=seed))
    graph.mlp("x", "y")
    source = loaded(graph.model(["y"]))
    plan = plan_all(source, calibrated=True)
    plan.subgraphs[0].decision, plan.subgraphs[0].residual_channels = decision, count
    with pytest.raises(PlanError, match=why):
        plan.check(source)


def test_w4a16_is_as_without(loaded: Load, seed: int) -> None:
    graph = Graph(spec(k=64, intermediate=96, out=48, seed=seed))
    graph.mlp("x", "y")
    source = loaded(graph.model(["y"]))
    given = samples(seed, 64, slice(0, 4))
    outputs = []
    for recipe in ("local-hessian+residual:64", "local-hessian"):
        plan = replace(plan_all(source), recipe=recipe)
        assert plan.subgraphs[0].decision == Decision.NVFP4_W4A16
        statistics = collect(source.path, calibration_tensors(plan), given)
        outputs += run(rewritten(source, plan, statistics).path, given[0]["x"])
    np.testing.assert_array_equal(*outputs)


def test_what_cannot_have_them_says_so(loaded: Load, seed: int) -> None:
    """Too few channels: planned without, with the reason."""
    graph = Graph(spec(k=32, intermediate=48, out=32, seed=seed))
    graph.mlp("x", "y")
    source = loaded(graph.model(["y"]))
    plan = plan_all(source, calibrated=True, recipe="max+residual:64")
    assert plan.subgraphs[0].reason.endswith("; no residual channels: a product reads fewer than 64 channels")
    given = samples(seed, 32, slice(0, 4))
    result = rewritten(source, plan, collect(source.path, calibration_tensors(plan), given))
    (plugin,) = nodes_of(result.path).values()
    assert next(a.i for a in plugin.attribute if a.name == "residual_channels") == 0


def test_statistics_in_another_order(seed: int) -> None:
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
    kinds = ("channel_amax", "mean_square", "block_gram", "hessian", "quantized_hessian", "quantized_cross")
    found = InputStatistics.of_rows(x, kinds).in_order(order)
    expected = InputStatistics.of_rows(x[:, order], kinds[:4])
    for kind in kinds[:4]:
        torch.testing.assert_close(found[kind], expected[kind])
    assert torch.equal(found["quantized_cross"], InputStatistics.of_rows(x, kinds)["quantized_cross"][order][:, order])


def test_spelling() -> None:
    recipe = parse("residual:64+mse")
    assert (str(recipe), recipe.residual) == ("mse+residual:64", 64)
    assert recipe.needs == frozenset()
    assert recipe.residual_needs == {"mean_square"}
    assert parse("local-hessian+residual:32").residual_needs == {"mean_square", "hessian"}
