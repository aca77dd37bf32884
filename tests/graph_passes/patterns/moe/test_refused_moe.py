"""Mixtures of experts that cannot be replaced, and those whose dimensions exporters leave open."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fuzz.models import models
from onnx import numpy_helper
from torch import Tensor, nn

from onnx_models import moe_spellings
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, assert_computes, quantized_spelling
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


def moes(model: SourceModel) -> list[Subgraph]:
    return [subgraph for subgraph in find_subgraphs(model) if subgraph.kind == "moe"]


def without_dimension_names(model: onnx.ModelProto) -> None:
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.ClearField("dim_param")


def test_dimensions_without_names(tmp_path: Path, seed: int) -> None:
    result = rewritten(load(damaged(tmp_path / "model.onnx", without_dimension_names, seed)))
    assert "NVFP4MoE" in [node.op_type for node in onnx.load(result.path).graph.node]
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    assert_computes(result.path, quantized_spelling(Moe(MoeSpec("gathered"), seed)), x)


def test_fixed_sizes_do_not_take_gigabytes(tmp_path: Path, seed: int) -> None:
    """A probe has the sizes that a model fixes: here, it would take 3 GB for a few kilobytes of weights."""

    def fixed(model: onnx.ModelProto) -> None:
        for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (4, 50_000), strict=False):
            dim.dim_value = size
        model.graph.ClearField("value_info")

    (block,) = moes(load(damaged(tmp_path / "model.onnx", fixed, seed)))
    assert block.unsupported is not None
    assert "fixed at 200000 tokens, for which telling its routing takes 2.6 GB; export it with a dynamic" in str(
        block.unsupported.text
    )


class WithCache(nn.Module):
    """One layer of a decoder: what it has seen, with the new tokens behind, goes in and comes out."""

    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([past, x[:, None]], 2)
        return self.moe(x + cache.mean(2)), cache


@pytest.mark.parametrize("dispatch", ["gathered", "scatter"])
@pytest.mark.filterwarnings("ignore")
def test_cache_with_a_length_of_its_own(dispatch: str, tmp_path: Path, seed: int) -> None:
    """The exporter takes the batch size from the cache, whose other dimension has nothing to do with the block."""
    model, path = WithCache(Moe(MoeSpec(dispatch), seed)).eval(), tmp_path / "model.onnx"
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    dynamic = ({0: "batch", 1: "sequence"}, {0: "batch", 2: "past_sequence"})
    inputs = (draw(2, 5, HIDDEN), draw(2, 1, 7, HIDDEN))
    torch.onnx.export(
        model, inputs, path, input_names=["x", "past"], dynamo=True, dynamic_shapes=dynamic, verbose=False
    )
    read = [(n.input[0], n.attribute) for n in onnx.load(path).graph.node if n.op_type == "Shape"]
    assert any(name == "past" and attributes for name, attributes in read)
    source = load(path)
    (subgraph,) = moes(source)
    assert subgraph.unsupported is None
    result = rewritten(source, plan_all(source, kinds=("moe",)))
    session = onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])
    quantized = WithCache(quantized_spelling(model.moe))
    for batch, tokens, past in ((1, 1, 9), (3, 4, 1), (2, 6, 0)):
        x, cache = draw(batch, tokens, HIDDEN), draw(batch, 1, past, HIDDEN)
        with torch.no_grad():
            expected = quantized(x, cache)[0].numpy()
        y = session.run(None, {"x": x.numpy(), "past": cache.numpy()})[0]
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MoeSpec(ragged=True), r"experts differ: expert 1, .* 64-64-64 silu, gated, expert 0 is 64-48-64"),
        (MoeSpec("mask", missing=1), r"router '.*' chooses among 4 experts, and the block has 3; export"),
        (MoeSpec("mask", activation="tanh"), r"MLP that ends in '.*', its activation \(Tanh, Mul\) is not one of"),
        (MoeSpec("gathered", shows_weights=True), r"an intermediate is used elsewhere: its tensor '.*' is also an out"),
        (MoeSpec("loop", experts=70, top_k=65), r"NVFP4MoE serves at most 64 of 1024 experts per token"),
    ],
    ids=str,
)
def test_refusals(spec: MoeSpec, reason: str, tmp_path: Path, seed: int) -> None:
    """What almost matches is kept, and the plan says which node is in the way."""
    moe_spellings.export(Moe(spec, seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    plan = plan_all(source, kinds=("moe",))
    (entry,) = [entry for entry in plan.subgraphs if entry.kind == "moe"]
    assert entry.decision == "keep"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(entry.reason)
    assert [n.op_type for n in onnx.load(rewritten(source, plan).path).graph.node if n.domain] == []


def damaged(path: Path, damage: Callable[[onnx.ModelProto], None], seed: int) -> Path:
    moe_spellings.export(Moe(MoeSpec("gathered"), seed), path, seed)
    model = onnx.load(path)
    damage(model)
    onnx.save(model, path)
    return path


def test_missing_expert(tmp_path: Path, seed: int) -> None:
    """A stack of three where the router chooses among four: nothing can compute that."""

    def drop(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if len(tensor.dims) == 3:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:3], tensor.name))

    with pytest.raises(ModelError, match=r"'stacked_up' and 'stacked_down' stack 3 and 3 experts, .* among 4; export"):
        find_subgraphs(load(damaged(tmp_path / "model.onnx", drop, seed)))


class Skips(Moe):
    """The router's last class is no expert: its tokens are left out of the sum (Zaya)."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(logits)
        skipped = chosen == self.spec.experts - 1
        return weights.masked_fill(skipped, 0), chosen.masked_fill(skipped, 0)


def test_class_that_is_no_expert(tmp_path: Path, seed: int) -> None:
    model = Skips(MoeSpec("gathered", experts=5, missing=1), seed)
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    (subgraph,) = moes(load(tmp_path / "model.onnx"))
    assert subgraph.unsupported is not None
    assert (
        "stack 4 and 4 experts, and the router '/router/MatMul' chooses among 5; NVFP4MoE needs"
        in subgraph.unsupported.text
    )


def test_more_chosen_than_there_are(tmp_path: Path, seed: int) -> None:
    def widen_choice(model: onnx.ModelProto) -> None:
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        tensors |= {node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"}
        (choice,) = [node for node in model.graph.node if node.op_type == "TopK"]
        tensors[choice.input[1]].CopyFrom(numpy_helper.from_array(np.array([5]), tensors[choice.input[1]].name))

    with pytest.raises(ModelError, match=r"node '.*TopK' \(TopK\) takes 5 of 4 experts"):
        find_subgraphs(load(damaged(tmp_path / "model.onnx", widen_choice, seed)))


def test_no_tokens(tmp_path: Path) -> None:
    """An input without values, which nothing can be probed with."""
    model = models()["moe"]
    onnx.save(model, tmp_path / "moe.onnx")
    (found,) = moes(load(tmp_path / "moe.onnx"))
    assert found.unsupported is None
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 0
    onnx.save(model, tmp_path / "empty.onnx")
    (found,) = moes(load(tmp_path / "empty.onnx"))
    assert found.unsupported is not None
    assert "has no tokens: its shape is [0, 32]" in found.unsupported.text
