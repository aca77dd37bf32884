"""Embedders and the output's projection of a denoiser stay; a product of few rows has 16-bit activations."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_models.passes import plan_all
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.patterns.edges import edge_subgraphs
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs

WIDTH = 64


def denoiser(seed: int) -> onnx.ModelProto:
    """Two blocks that both read `text`, and are shifted by an embedding of `time`."""
    rng = np.random.default_rng(seed)
    nodes, weights = [], []

    def linear(name: str, x: str) -> str:
        weights.append(numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32), f"{name}.w"))
        nodes.append(helper.make_node("MatMul", [x, f"{name}.w"], [name], name))
        return name

    def op(kind: str, name: str, *inputs: str) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [name], name))
        return name

    weights.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    hidden, embedded = linear("embed", "latents"), linear("time_embed", "time")
    for block in ("a", "b"):
        shift = op("Unsqueeze", f"{block}.shift", linear(f"{block}.modulation", embedded), "axis")
        text = op("Softmax", f"{block}.seen", linear(f"{block}.text", "text"))
        product = linear(f"{block}.linear", op("Add", f"{block}.in", hidden, shift))
        hidden = op("Add", f"{block}.out", op("Add", f"{block}.both", product, text), hidden)
    output = linear("project", hidden)
    shapes = {"latents": (1, 256, WIDTH), "time": (1, WIDTH), "text": (1, 256, WIDTH)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, (1, 256, WIDTH))]
    graph = helper.make_graph(nodes, "denoiser", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_edges_stay_and_few_rows_keep_their_activations(loaded: Callable[..., SourceModel], seed: int) -> None:
    source = loaded(denoiser(seed))
    subgraphs = find_subgraphs(source)
    edges = edge_subgraphs(source, subgraphs)
    ends = {subgraph.output: edges.get(subgraph.name, "") for subgraph in subgraphs}
    assert {output for output, reason in ends.items() if reason} == {"embed", "time_embed", "project"}
    assert "input latents" in ends["embed"]
    assert "makes the output" in ends["project"]
    tokens = {
        subgraph.name: 1 if "time" in subgraph.output or "modul" in subgraph.output else 256 for subgraph in subgraphs
    }
    plan = plan_all(source, "auto", calibrated=True, tokens=tokens, keeps_edges=True)
    decisions = {subgraph.output: entry for subgraph, entry in zip(subgraphs, plan.subgraphs, strict=True)}
    assert {output for output, entry in decisions.items() if entry.decision == "keep"} == {
        "embed",
        "time_embed",
        "project",
    }
    few = {output: entry for output, entry in decisions.items() if entry.decision == "nvfp4_w4a16"}
    assert few
    assert all("modulation" in output and entry.reason_code == "few_rows" for output, entry in few.items())
    assert decisions["a.linear"].decision == decisions["b.text"].decision == "nvfp4_w4a4"
    without = plan_all(source, "auto", calibrated=True, tokens=dict.fromkeys(tokens, 256))
    assert {entry.decision for entry in without.subgraphs} == {"nvfp4_w4a4"}
