"""Rows of subgraphs are inferred without the weights (what they are: test_roofline.py)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_models.graphs import parsed
from trt_nvfp4.builder.inputs import row_counts
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs


def saved(path: Path, text: str, rng: np.random.Generator, external: bool = False) -> SourceModel:
    """The model with a weight `w` [64, 64] in float32, 16 KiB."""
    onnx.save(
        parsed(text, {"w": (64, 64)}, rng), path, save_as_external_data=external, location="m.data", size_threshold=0
    )
    return load(path)


@pytest.mark.parametrize("external", [False, True])
def test_weights_are_neither_copied_nor_changed(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    """And a small constant, the target of a Reshape, still says how many rows there are."""
    text = """g (float[batch, sequence, 128] x) => (float[rows, 64] y) <int64[2] target = {-1, 64}> {
        r = Reshape(x, target)
        y = MatMul(r, w) }"""
    model = saved(tmp_path / "m.onnx", text, rng, external)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    sizes = []
    changed = row_counts.changed_by_onnx

    def recorded(change: Callable[[onnx.ModelProto], onnx.ModelProto], proto: onnx.ModelProto) -> onnx.ModelProto:
        sizes.append(proto.ByteSize())
        return changed(change, proto)

    monkeypatch.setattr(row_counts, "changed_by_onnx", recorded)
    assert list(subgraph_tokens(model, find_subgraphs(model), {"x": (3, 5, 128)}).values()) == [30]
    assert len(sizes) == 1
    assert sizes[0] < 1024
    after = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert model.tensor("w").shape == (64, 64)


def test_a_model_without_inputs(tmp_path: Path, rng: np.random.Generator) -> None:
    text = """g () => (float[4, 64] y) <int64[2] shape = {4, 64}> {
        c = ConstantOfShape(shape)
        h = Relu(c)
        y = MatMul(h, w) }"""
    model = saved(tmp_path / "m.onnx", text, rng)
    assert list(subgraph_tokens(model, find_subgraphs(model)).values()) == [4]
