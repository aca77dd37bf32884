"""Linears of one input become one subgraph and one plugin node, with the values of each alone."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from onnx_models.graphs import Graph, quantized_twin, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.common import nvfp4
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, rewrite
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices

Load = Callable[[onnx.ModelProto], SourceModel]
SIZES = {"q": 48, "k": 16, "v": 24}


def projections(graph: Graph, x: str = "x", prefix: str = "", sizes: Mapping[str, int] = SIZES) -> list[str]:
    """Linears of `x`, whose weights then have one tensor scale; their outputs."""
    first = len(graph.groups)
    found = [graph.linear(x, f"{prefix}{name}_w", graph.spec.k, n, f"{prefix}{name}") for name, n in sizes.items()]
    graph.groups[first:] = [[entry for group in graph.groups[first:] for entry in group]]
    return found


def agree(model: onnx.ModelProto, found: Path, x: np.ndarray) -> None:
    for expected, actual in zip(run(model, x), run(found, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def draw(seed: int, k: int, rows: tuple[int, ...] = (2, 3)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*rows, k)).astype(np.float32)


@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_transposed", "gemm_scaled", "einsum"])
@pytest.mark.parametrize("biases", [False, True])
def test_one_node_computes_all(linear: str, biases: bool, loaded: Load, seed: int) -> None:
    graph = Graph(spec(linear=linear, biases=biases, seed=seed))
    names = projections(graph)
    rank = 2 if linear.startswith("gemm") else 3
    model = graph.model(names, rank)
    source = loaded(model)
    (found,) = find_subgraphs(source)
    assert (found.kind, found.shapes, found.unsupported) == ("linear", {"in_features": 32, "out_features": 88}, None)
    assert [part.y.name for part in found.linears] == names
    result = rewritten(source)
    written = onnx.load(result.path)
    assert [node.op_type for node in written.graph.node] == ["NVFP4Linear", "Split"]
    assert [value.name for value in written.graph.output] == names
    agree(quantized_twin(graph, model), result.path, draw(seed, 32, (5,) if rank == 2 else (2, 3)))


def test_layers_stay_apart(loaded: Load, seed: int) -> None:
    """Attention separates layers that project one input, as those of a decoder do with the encoder's output."""
    graph = Graph(spec(seed=seed))
    outputs = []
    for layer in ("a_", "b_"):
        query, key = projections(graph, prefix=layer, sizes={"q": 16, "k": 16})
        turned = graph.op("Transpose", [key], f"{layer}turned", perm=[0, 2, 1])
        scores = graph.op("MatMul", [query, turned], f"{layer}scores")
        outputs.append(graph.op("Softmax", [scores], f"{layer}weights", axis=-1))
    model = graph.model(outputs)
    source = loaded(model)
    assert [[part.y.name for part in found.linears] for found in find_subgraphs(source)] == [
        ["a_q", "a_k"],
        ["b_q", "b_k"],
    ]
    agree(quantized_twin(graph, model), rewritten(source).path, draw(seed, 32))


def test_low_rank_projections_around_another(loaded: Load, seed: int) -> None:
    """Latent attention projects the query twice before the keys once: what reads another input lies between."""
    graph = Graph(spec(seed=seed))
    graph.linear("x", "qa", 32, 32, "latent")
    graph.linear("latent", "qb", 32, 16, "q")
    graph.linear("x", "kv", 32, 24, "k")
    graph.groups[:] = [[*graph.groups[0], *graph.groups[2]], graph.groups[1]]
    model = graph.model(["q", "k"])
    source = loaded(model)
    assert [[part.y.name for part in found.linears] for found in find_subgraphs(source)] == [["latent", "k"], ["q"]]
    agree(quantized_twin(graph, model), rewritten(source).path, draw(seed, 32))


def test_what_stays_alone(loaded: Load, seed: int) -> None:
    """A linear whose weight something else reads, one of another input, and a second one of the same weight."""
    graph = Graph(spec(seed=seed))
    graph.linear("x", "a", 32, 16, "ya")
    graph.linear("x", "b", 32, 16, "yb")
    graph.op("Neg", ["x"], "negative")
    graph.linear("negative", "c", 32, 16, "yc")
    source = loaded(
        graph.model(["ya", "yb", "yc", graph.op("MatMul", ["ya", graph.op("Transpose", ["b"], "bt")], "z")])
    )
    found = find_subgraphs(source)
    assert all(len(part.linears) == 1 for part in found)
    assert sorted(part.output for part in found if part.unsupported is None) == ["ya", "yc"]
    alike = Graph(spec(seed=seed))
    alike.linear("x", "a", 32, 16, "k")
    alike.op("MatMul", ["x", "a"], "v")
    source = loaded(alike.model(["k", "v"]))
    assert all(part.unsupported is not None or len(part.linears) == 1 for part in find_subgraphs(source))


@pytest.mark.parametrize("decision", ["keep", "fp8", "bf16"])
def test_other_decisions(decision: str, loaded: Load, seed: int) -> None:
    """The entry is kept, or lowered linear by linear: the shape of the graph is TensorRT's matter there."""
    graph = Graph(spec(biases=True, seed=seed))
    model = graph.model(projections(graph))
    source = loaded(model)
    plan = plan_all(source)
    (entry,) = plan.subgraphs
    entry.decision = decision
    result = rewritten(source, plan)
    written = onnx.load(result.path)
    assert sum(node.op_type == "MatMul" for node in written.graph.node) == 3
    if decision == "keep":
        agree(model, result.path, draw(seed, 32))
    else:
        assert len(result.realized[entry.name]) == 3


def test_excluded_as_one(loaded: Load) -> None:
    graph = Graph(spec())
    source = loaded(graph.model(projections(graph)))
    (entry,) = plan_all(source, exclude=find_subgraphs(source)[0].nodes[-1]).subgraphs
    assert entry.decision == "keep"


@pytest.mark.parametrize("recipe", ["awq", "gptq"])
def test_recipes_that_calibrate(recipe: str, loaded: Load, seed: int) -> None:
    """Closer to the original than random weights by far; channel scales are folded into the norm in front."""
    graph = Graph(spec(seed=seed))
    weight = graph.draw("scale", 32)
    graph.weights[weight] = np.abs(graph.weights[weight]) + 0.5
    graph.op("LayerNormalization", ["x", weight], "n", axis=-1)
    model = graph.model(projections(graph, "n"))
    source = loaded(model)
    plan = plan_all(source, calibrated=True, recipe=recipe)
    samples = [{"x": draw(seed + number, 32)} for number in range(3)]
    statistics = collect(source.path, calibration_tensors(plan), samples)
    plan.subgraphs[0].decision = "nvfp4_w4a16"
    x = draw(seed + 7, 32)
    for expected, found in zip(run(model, x), run(rewritten(source, plan, statistics).path, x), strict=True):
        assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


@pytest.mark.parametrize("case", ["one scale", "own scales", "one missing"])
def test_weights_of_a_checkpoint(case: str, loaded: Load, tmp_path: Path, seed: int) -> None:
    """One node where the checkpoint has one tensor scale, and one for each linear otherwise: bits are taken over."""
    graph = Graph(spec(linear="transpose", seed=seed))
    projections(graph)
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(SIZES):
        if case == "one missing" and name == "v":
            continue
        scale = torch.tensor(0.001 * (1 + number * (case == "own scales")))
        packed, block_scales, _ = nvfp4.quantize(torch.from_numpy(graph.weights[f"{name}_w"]), scale)
        graph.weights[f"{name}_w"] = nvfp4.dequantize(packed, block_scales, scale).numpy()
        tensors |= {
            f"{name}_w.weight": packed,
            f"{name}_w.weight_scale": block_scales,
            f"{name}_w.weight_scale_2": scale,
        }
    save_file(tensors, tmp_path / "model.safetensors")
    source = loaded(graph.model(list(SIZES)))
    checkpoint = NVFP4Checkpoint(tmp_path)
    plan = plan_all(source)
    (part,) = find_subgraphs(source)
    assert held_matrices(checkpoint, part) == [True, True, case != "one missing"]
    result = rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=checkpoint)
    assert len(result.realized[part.name]) == (1 if case == "one scale" else 3)
    x = draw(seed, 32)
    exact = ["q", "k"] if case == "one missing" else list(SIZES)
    rounded = graph.model(list(SIZES))
    for name, expected, found in zip(SIZES, run(rounded, x), run(result.path, x), strict=True):
        tolerance = 1e-5 if name in exact else 0.2
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)
