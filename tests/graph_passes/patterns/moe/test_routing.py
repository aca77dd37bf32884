"""How a mixture of experts chooses: by groups, by the smallest of negated scores, one expert without TopK."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onnx_models import moe_spellings
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, assert_computes, quantized_spelling
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.patterns.moe.probe_inputs import draw
from trt_nvfp4.graph_passes.patterns.moe.routing import weights
from trt_nvfp4.graph_passes.subgraphs.parts import Routing


def routing_of(source: SourceModel) -> Routing:
    (subgraph,) = (subgraph for subgraph in find_subgraphs(source) if subgraph.kind == "moe")
    assert subgraph.unsupported is None
    assert subgraph.moe is not None
    return subgraph.moe.routing


@pytest.mark.parametrize(("experts", "n_group"), [(8, 2), (8, 4), (16, 4), (64, 8)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_samples_tell_how_groups_are_compared(scoring: str, experts: int, n_group: int) -> None:
    """By their best score or by the sum of their best two: peaked scores alone choose the same groups by either."""
    routing = Routing(top_k=2, scoring=scoring, n_group=n_group, topk_group=n_group // 2)
    for seed in range(20):
        samples = draw(np.random.default_rng(seed), 6, 16, experts, 2)
        logits = torch.from_numpy(samples.logits).double()[[case.startswith("groups") for case in samples.cases]]
        best, sums = (weights(logits, replace(routing, group_score_top=top), None) for top in (1, 2))
        assert ((best > 0) != (sums > 0)).any(1).sum() >= 2


def check_rewritten(model: Moe, expected: Routing, folder: Path, seed: int) -> SourceModel:
    """The routing is found, and the rewritten model computes what the model does with quantized experts."""
    moe_spellings.export(model, folder / "model.onnx", seed)
    source = load(folder / "model.onnx")
    assert routing_of(source) == expected
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    assert_computes(rewritten(source, plan_all(source, kinds=("moe",))).path, quantized_spelling(model), x)
    return source


class GroupLimited(Moe):
    """Of the best two of four groups (DeepSeek-V2's group_limited_greedy): the scores of the others become 0."""

    def __init__(self, spec: MoeSpec, seed: int, bias: bool = False) -> None:
        super().__init__(spec, seed)
        self.bias = nn.Parameter(torch.randn(spec.experts) / 5) if bias else 0.0

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1) if self.spec.scoring == "softmax" else logits.sigmoid()
        groups = (scores + self.bias).view(scores.shape[0], 4, -1)
        best = groups.amax(-1).topk(2, sorted=False)[1]
        is_open = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)[..., None].expand_as(groups).bool()
        chosen = groups.masked_fill(~is_open, 0.0).reshape(scores.shape).topk(self.spec.top_k, sorted=False)[1]
        return scores.gather(1, chosen) * self.spec.factor, chosen


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_group_limited(scoring: str, tmp_path: Path, seed: int) -> None:
    model = GroupLimited(MoeSpec("mask", experts=8, top_k=3, scoring=scoring, factor=2.5), seed)
    groups = {"n_group": 4, "topk_group": 2, "group_score_top": 1}
    check_rewritten(model, Routing(top_k=3, scoring=scoring, scaling_factor=2.5, **groups), tmp_path, seed)


@pytest.mark.parametrize(("smallest", "found"), [(-0.3, "given"), (0.0, "sigmoid")])
def test_group_limited_with_bias(smallest: float, found: str, tmp_path: Path, seed: int) -> None:
    """Scores plus a negative bias may be negative, so that an expert that was closed by a 0 is chosen after all: the op
    does not do that, and takes what the model chooses."""
    model = GroupLimited(MoeSpec("mask", experts=8, top_k=3, scoring="sigmoid"), seed, bias=True)
    with torch.no_grad():
        model.bias += smallest - model.bias.min()
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    assert routing_of(load(tmp_path / "model.onnx")).scoring == found


class Negated(Moe):
    """The smallest of the negated scores are chosen."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        if self.spec.top_k == 1:
            chosen = (-scores).argmin(-1, keepdim=True)
            return scores.gather(1, chosen), chosen
        weights, chosen = (-scores).topk(self.spec.top_k, -1, largest=False)
        return -weights, chosen


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dispatch", ["loop", "gathered"])
def test_smallest_of_negated_scores(dispatch: str, top_k: int, tmp_path: Path, seed: int) -> None:
    model = Negated(MoeSpec(dispatch, top_k=top_k, renormalize=False), seed)
    check_rewritten(model, Routing(top_k=top_k, scoring="softmax"), tmp_path, seed)


class Divided(Moe):
    """Logits weigh, divided by their sum, or by `smallest` if that is more, which is no routing of the op."""

    def __init__(self, spec: MoeSpec, seed: int, smallest: float | None) -> None:
        super().__init__(spec, seed)
        self.smallest = smallest

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.topk(self.spec.top_k, -1)
        total = weights.sum(-1, keepdim=True)
        return weights / (total if self.smallest is None else total.clamp_min(self.smallest)), chosen


@pytest.mark.parametrize("smallest", [None, 1e-6])
def test_logits_divided_by_their_sum(smallest: float | None, tmp_path: Path, seed: int) -> None:
    model = Divided(MoeSpec("gathered", top_k=3), seed, smallest)
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    found = routing_of(load(tmp_path / "model.onnx"))
    if smallest is None:
        assert found == Routing(top_k=3, scoring="given", renormalize=True)
    else:
        assert found.given is not None


class BestOnly(Moe):
    """Each token goes to one expert, which no TopK chooses; weighted by its score, or, `hard`, by 1."""

    def __init__(self, spec: MoeSpec, seed: int, choice: str) -> None:
        super().__init__(spec, seed)
        self.choice = choice

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.choice == "hard":
            return torch.ones_like(logits[:, :1]), logits.argmax(-1, keepdim=True)
        scores = logits.sigmoid() if self.spec.scoring == "sigmoid" else logits.softmax(-1)
        if self.choice == "max":
            weights, chosen = scores.max(-1, keepdim=True)
            return weights, chosen
        chosen = scores.argmax(-1)[:, None]
        return scores.gather(1, chosen), chosen


@pytest.mark.parametrize("dispatch", ["mask", "gathered"])
@pytest.mark.parametrize(
    ("choice", "scoring", "found"),
    [("max", "softmax", "softmax"), ("argmax", "sigmoid", "sigmoid"), ("hard", "softmax", "softmax_of_chosen")],
)
def test_best_only(choice: str, scoring: str, found: str, dispatch: str, tmp_path: Path, seed: int) -> None:
    model = BestOnly(MoeSpec(dispatch, experts=8, top_k=1, scoring=scoring, shared=True), seed, choice)
    source = check_rewritten(model, Routing(top_k=1, scoring=found), tmp_path, seed)
    assert not [node for node in source.graph if node.op_type == "TopK"]
