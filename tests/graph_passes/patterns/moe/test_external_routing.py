"""Routings that the op has no scoring for: the model's own values say which experts are chosen and how they weigh."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from onnx_models import moe_spellings
from onnx_models.graphs import run
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, quantized_spelling
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


def cosines(dispatch: str, **others: Any) -> MoeSpec:
    """The largest cosines of logits are chosen, and weigh."""
    return MoeSpec(dispatch, scoring="cos", renormalize=False, **others)


class Smallest(Moe):
    """Of the smallest scores."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(self.spec.top_k, -1, largest=False)
        return weights, chosen


class Signed(Moe):
    """Weights of either sign, and some that are 0."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.topk(self.spec.top_k, -1)[1]
        return functional.softshrink(torch.sin(3 * logits.gather(1, chosen)), 0.2), chosen


class SmallNumbers(Moe):
    """The experts' numbers are of 32 bits."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(logits)
        return weights, chosen.int()

    def _mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            own = (chosen == torch.tensor(index, dtype=torch.int32)).to(x.dtype)
            y = y + expert(x) * (weights * own).sum(-1, keepdim=True)
        return y


class Sparser(Moe):
    """An expert is never chosen, and only some tokens go to experts at all, each of which takes twelve at most."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.masked_fill(torch.arange(self.spec.experts) == 2, -torch.inf).softmax(-1)
        weights, chosen = scores.topk(self.spec.top_k, -1)
        rank = functional.one_hot(chosen, self.spec.experts).sum(1).cumsum(0)
        return weights * (scores.amax(-1, keepdim=True) > 0.3) * (rank <= 12).gather(1, chosen), chosen


class OfInputs(Moe):
    """The weights multiply what the experts read (Llama 4)."""

    def _mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + expert(x * (weights * (chosen == index)).sum(-1, keepdim=True))
        return y


class Unflattened(Moe):
    """Logits have the batch's dimension, as many as the matrices of all chosen experts, one after another, have."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(self.router(x))
        every, numbers = x.repeat_interleave(self.spec.top_k, 1).view(-1, 1, HIDDEN), chosen.flatten()
        gate, up = every.bmm(self.stacked_gate[numbers]), every.bmm(self.stacked_up[numbers])
        y = (functional.silu(gate) * up).bmm(self.stacked_down[numbers]).view(*weights.shape, HIDDEN)
        return (y * weights[..., None]).sum(2)


def found(source: SourceModel) -> Subgraph:
    (subgraph,) = (subgraph for subgraph in find_subgraphs(source) if subgraph.kind == "moe")
    return subgraph


CASES = [
    (Moe, cosines("loop", experts=8, top_k=3)),
    (Moe, cosines("stack", factor=2.5)),
    (Moe, cosines("mask", experts=8, top_k=1, biases=True)),
    (Smallest, MoeSpec("gathered")),
    (Smallest, MoeSpec("mask", shared=True)),
    (Signed, MoeSpec("scatter", experts=8, top_k=4)),
    (Signed, MoeSpec("dense", experts=8)),
    (SmallNumbers, cosines("mask")),
    (Sparser, MoeSpec("mask", experts=8)),
    (OfInputs, cosines("mask", experts=8)),
    (Unflattened, cosines("gathered")),
]


@pytest.mark.parametrize(("kind", "spec"), CASES, ids=lambda case: getattr(case, "__name__", None) or case.dispatch)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_given(kind: type[Moe], spec: MoeSpec, dtype: torch.dtype, tmp_path: Path, seed: int) -> None:
    """Replaced, with the model's own choice in front; the values are those of the model with quantized experts."""
    model = kind(spec, seed)
    moe_spellings.export(model.to(dtype), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    subgraph = found(source)
    assert subgraph.unsupported is None
    assert subgraph.moe is not None
    routing = subgraph.moe.routing
    assert (routing.scoring, routing.top_k, routing.scale_input) == ("given", spec.top_k, kind is OfInputs)
    assert routing.scaling_factor == 1.0  # a factor of the model's is part of the weights
    assert (subgraph.moe.shared is not None) == spec.shared

    written = onnx.load(rewritten(source, plan_all(source, kinds=("moe",))).path)
    onnx.checker.check_model(written)
    assert [node.op_type for node in written.graph.node if node.domain] == ["NVFP4MoE"]
    assert sum(node.op_type == "TopK" for node in written.graph.node) == 1
    x = torch.randn(3, 20, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    x = (x * torch.tensor([0.5, 1.0, 5.0])[:, None, None]).to(dtype)
    with torch.no_grad():
        expected = quantized_spelling(model.float())(x.float()).numpy()
    (y,) = run(widen(written), x.numpy())
    tolerance, close = (1e-5, 1.0) if dtype == torch.float32 else (3e-3, 0.9)  # float16 may choose otherwise at a tie
    scale = np.abs(expected).max((1, 2), keepdims=True)
    assert (np.abs(y - expected) <= tolerance * scale).all(-1).mean() >= close


class Squares(Moe):
    """The squares of what the experts give are summed up."""

    def _mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + (expert(x) * (weights * (chosen == index)).sum(-1, keepdim=True)).square()
        return y


class Capacity(Moe):
    """An expert takes the first four tokens that chose it, which no value says for all experts."""

    def _mask(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            own = (chosen == index).any(-1, keepdim=True)
            own = own & (own.int().cumsum(0) <= 4)
            y = y + expert(x) * (weights * (chosen == index) * own).sum(-1, keepdim=True)
        return y


@pytest.mark.parametrize("kind", [Squares, Capacity])
def test_what_is_no_such_sum_is_kept(kind: type[Moe], tmp_path: Path, seed: int) -> None:
    moe_spellings.export(kind(cosines("mask"), seed), tmp_path / "model.onnx", seed)
    unsupported = found(load(tmp_path / "model.onnx")).unsupported
    assert unsupported is not None
    assert "(TopK) is not a weighted sum of the experts that it chooses" in unsupported.text
