"""A network that a graph calls several times, as an unrolled denoising loop does: its weights are made once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_models.graphs import ACTIVATION_SPELLINGS, Graph, Spec, quantized_twin, run, spec
from onnx_models.passes import EVERYTHING, found_mlps, plan_all, rewritten
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.statistics import Statistics, collect
from trt_nvfp4.graph_passes.find import find_subgraphs
from trt_nvfp4.graph_passes.fold_channel_scales import find_foldings
from trt_nvfp4.graph_passes.plan import PlanError
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.graph_passes.source import SourceModel

Load = Callable[[onnx.ModelProto], SourceModel]
STEPS = 3
RELU2 = ACTIVATION_SPELLINGS["relu2"][0]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unrolled(of: Spec, between: str | None = "Tanh") -> tuple[onnx.ModelProto, Graph]:
    """The spec's MLP, `STEPS` times over the same weights; the outputs are y0, y1, ... of every step."""
    graph = Graph(of)
    graph.mlp("x", "y0")
    once = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.nodes]
    computed = {name for node in once for name in node.output}
    for step in range(1, STEPS):
        start = graph.op(between, [f"y{step - 1}"], f"x{step}") if between else f"y{step - 1}"
        names = {name: f"{name}_{step}" for name in computed} | {"x": start, "y0": f"y{step}"}
        for node in once:
            copy = onnx.NodeProto.FromString(node.SerializeToString())
            copy.name = f"{node.name}_{step}"
            copy.input[:] = [names.get(name, name) for name in node.input]
            copy.output[:] = [names[name] for name in node.output]
            graph.nodes.append(copy)
    rank = 2 if of.linear.startswith("gemm") else 3
    return graph.model([f"y{step}" for step in range(STEPS)], rank), graph


def small(**changes: object) -> Spec:
    return spec(**{"k": 32, "intermediate": 48, "out": 32, "biases": True} | changes)


def written_bytes(model: onnx.ModelProto) -> int:
    return sum(numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer)


@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_scaled"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_step_is_replaced(linear: str, gated: bool, loaded: Load, seed: int) -> None:
    """All read one set of quantized weights; every output is that of the model with dequantized weights."""
    model, graph = unrolled(small(linear=linear, gated=gated, seed=seed))
    result = rewritten(loaded(model))
    written = onnx.load(result.path)
    plugins = [node for node in written.graph.node if node.domain]
    assert sorted(node.name for node in plugins) == sorted(result.realized)
    assert len(plugins) == STEPS
    formal = [i for i, name in enumerate(plugins[0].input) if "_weight" in name and "norm" not in name]
    assert len(formal) == 6
    for i in formal:
        assert len({node.input[i] for node in plugins}) == 1
    once = sum(array.nbytes for array in graph.weights.values())
    assert result.weights_bytes_before == once
    assert result.weights_bytes_after == written_bytes(written) < once / 2
    x = draw(seed, 5, 32) if linear.startswith("gemm") else draw(seed, 2, 5, 32)
    for found, expected in zip(run(result.path, x), run(quantized_twin(graph, model), x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_linears(loaded: Load, seed: int) -> None:
    graph = Graph(small(biases=False, seed=seed))
    graph.linear("x", "w", 32, 32, "y0")
    for step in (1, 2):
        graph.op("MatMul", [graph.op("Softmax", [f"y{step - 1}"], f"x{step}"), "w"], f"y{step}")
    model = graph.model(["y0", "y1", "y2"])
    result = rewritten(loaded(model))
    written = onnx.load(result.path)
    plugins = [node for node in written.graph.node if node.domain]
    assert [node.op_type for node in plugins] == ["NVFP4Linear"] * 3
    assert len({node.input[1] for node in plugins}) == 1
    x = draw(seed, 2, 5, 32)
    for found, expected in zip(run(result.path, x), run(quantized_twin(graph, model), x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_consecutive_steps_are_not_stacked(loaded: Load) -> None:
    """A persistent op of several layers would hold the same weights once per layer."""
    model, _ = unrolled(small(), between=None)
    del model.graph.output[:-1]
    mlps = found_mlps(loaded(model))
    assert [mlp.shapes["layers"] for mlp in mlps] == [1] * STEPS


@pytest.mark.parametrize("kept", range(STEPS))
def test_one_step_is_kept(kept: int, loaded: Load, seed: int) -> None:
    """It computes with the model's own weights, the others with the quantized ones: both are written."""
    model, graph = unrolled(small(linear="transpose", seed=seed))
    source = loaded(model)
    plan = plan_all(source)
    plan.subgraphs[kept].decision = "keep"
    result = rewritten(source, plan)
    twin = quantized_twin(graph, model)
    matrices = [name for name, array in graph.weights.items() if array.ndim == 2]
    twin.graph.initializer.extend(numpy_helper.from_array(graph.weights[name], f"own_{name}") for name in matrices)
    suffix = f"_{kept}" if kept else ""
    for node in list(twin.graph.node):
        if node.op_type == "Transpose" and (node.name.endswith(suffix) if kept else "_" not in node.name):
            node.input[0] = f"own_{node.input[0]}"
    x = draw(seed, 2, 5, 32)
    for found, expected in zip(run(result.path, x), run(twin, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert result.weights_bytes_after == written_bytes(onnx.load(result.path)) > result.weights_bytes_before


def test_weights_are_made_for_the_inputs_of_all_steps(loaded: Load, seed: int) -> None:
    """What a recipe knows of a weight's inputs is the mean over the steps, as if one step had seen all samples."""
    recipe = "local-hessian+gptq"
    model, graph = unrolled(small(gated=False, spelling=RELU2, activation="relu2", seed=seed))
    source = loaded(model)
    plan = plan_all(source, calibrated=True, recipe=recipe)
    samples = [{"x": draw(seed + i, 2, 32, 32)} for i in range(2)]
    statistics = collect(source.path, calibration_tensors(plan), samples)
    several = onnx.load(rewritten(source, plan, statistics).path)

    once = Graph(graph.spec)
    once.mlp("x", "y0")
    single = loaded(once.model(["y0"]))
    (entry,) = (plan_of_one := plan_all(single, calibrated=True, recipe=recipe)).subgraphs
    arrays = {}
    for i, tensor in enumerate(entry.linear_inputs):
        steps = [e.linear_inputs[i] for e in plan.subgraphs]
        kinds = statistics.arrays[steps[0]]
        arrays[tensor] = {
            kind: (np.max if kind == "channel_amax" else np.mean)([statistics.arrays[s][kind] for s in steps], axis=0)
            for kind in kinds
        }
    amax = dict.fromkeys(entry.linear_inputs, 1.0)
    alone = onnx.load(rewritten(single, plan_of_one, Statistics(amax, 2, arrays)).path)

    def weights(written: onnx.ModelProto) -> list[bytes]:
        tensors = {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in written.graph.initializer}
        node = next(node for node in written.graph.node if node.domain)
        return [tensors[name] for name in node.input if "_weight" in name and "norm" not in name]

    assert weights(several) == weights(alone)


def test_awq_leaves_them(loaded: Load) -> None:
    """Scales that suit one step would be wrong for the others: the weights, which Transposes read, are not folded."""
    model, _ = unrolled(small(gated=False, spelling=RELU2, activation="relu2", linear="transpose", biases=False))
    source = loaded(model)
    assert parse("mse+awq").awq
    foldings, obstacles = find_foldings(found_mlps(source))
    assert foldings == []
    assert len(obstacles) == STEPS


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_other_precisions_leave_them(precision: str, loaded: Load) -> None:
    source = loaded(unrolled(small())[0])
    entries = plan_all(source, precision).subgraphs
    assert [entry.decision for entry in entries] == ["keep"] * STEPS
    assert all("several subgraphs read weight 'gate'" in entry.reason for entry in entries)
    edited = plan_all(source)
    edited.subgraphs[1].decision = precision
    with pytest.raises(PlanError, match=f"cannot be {precision}: several subgraphs read weight 'gate'"):
        edited.check(source, EVERYTHING)


def test_a_step_that_cannot_be_replaced(loaded: Load) -> None:
    """An output within one step refuses that step, and the others with it, whose weights it keeps."""
    model, _ = unrolled(small())
    model.graph.output.append(onnx.helper.make_tensor_value_info("h_1", onnx.TensorProto.FLOAT, [None] * 3))
    reasons = [subgraph.refusal for subgraph in find_subgraphs(loaded(model))]
    assert len(reasons) == STEPS
    assert sum("'h_1' is also an output" in (reason or "") for reason in reasons) == 1
    assert sum("its weight 'gate' is shared" in (reason or "") for reason in reasons) == STEPS - 1
