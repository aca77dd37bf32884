"""Subgraphs bound to a clone are those that are found in the clone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from onnx_models import moe_spellings
from onnx_models.graphs import Graph, spec
from onnx_models.moe_spellings import Moe, MoeSpec
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs.rebind import rebind


def check(model: SourceModel, kinds: set[str]) -> None:
    found = find_subgraphs(model)
    assert kinds <= {subgraph.kind for subgraph in found}
    clone = replace(model, ir_model=model.ir_model.clone())
    bound = rebind(found, model.graph, clone.graph)
    assert bound == find_subgraphs(clone)  # values and nodes are equal where they are the same object
    assert bound != found


@pytest.mark.parametrize("fused", [None, "split", "slice"])
def test_mlps_and_linears(fused: str | None, loaded: Callable[[onnx.ModelProto], SourceModel]) -> None:
    graph = Graph(spec(fused=fused))
    graph.mlp("x", "y")
    check(loaded(graph.model(["y"])), {"gated_mlp"})


@pytest.mark.parametrize("dispatch", ["loop", "gathered"])
def test_experts(dispatch: str, tmp_path: Path) -> None:
    moe_spellings.export(Moe(MoeSpec(dispatch, shared=True)), tmp_path / "moe.onnx", seed=0)
    check(load(tmp_path / "moe.onnx"), {"moe", "linear"})
