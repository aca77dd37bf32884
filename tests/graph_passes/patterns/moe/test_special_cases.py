"""Blocks that differ from a mixture of experts for some tokens only are not taken for one where no values of theirs say
how they weigh experts (test_external_routing.py), and the plan says for which tokens; what else is in a block's way is
named, too."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its customary name)

from onnx_models import moe_spellings
from onnx_models.graphs import run
from onnx_models.moe_spellings import HIDDEN, Expert, Moe, MoeSpec, assert_computes
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.subgraphs import parts

Change = Callable[[Tensor], Tensor]


def same(values: Tensor) -> Tensor:
    return values


class Special(Moe):
    """A mixture of experts with a change at one place: `factors` of all experts' weights alone, or another."""

    def __init__(
        self,
        spec: MoeSpec,
        seed: int,
        *,
        logits: Change = same,
        factors: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        routed: Change = same,
        y: Change = same,
    ) -> None:
        super().__init__(spec, seed)
        self._changes = logits, factors, routed, y

    def forward(self, x: Tensor) -> Tensor:
        logits, factors, routed, y = self._changes
        rows = x.view(-1, HIDDEN)
        scores = logits(self.router(rows)).softmax(-1)
        weights, chosen = torch.topk(scores, self.spec.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        if factors is None:
            total = self._mask(rows, weights, chosen)
        else:
            every = self._all(weights, chosen) * self._all(factors(chosen, scores, rows).to(weights.dtype), chosen)
            total = sum(expert(rows) * every[:, index, None] for index, expert in enumerate(self.experts))
        total = routed(total)
        return y(total if self.shared is None else total + self.shared(rows)).view(x.shape)


def capacity(chosen: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    rank = F.one_hot(chosen, scores.shape[1]).sum(1).cumsum(0)
    return (rank <= 12).gather(1, chosen)


def confident(chosen: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    return (scores.amax(-1, keepdim=True) > 0.26).expand_as(chosen)


def doubtful(chosen: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    return (scores.amax(-1, keepdim=True) < 0.99999).expand_as(chosen)


def unpadded(chosen: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    return (x.abs().sum(-1, keepdim=True) > 0).expand_as(chosen)


MASK = MoeSpec("mask")
FOR_TYPICAL = "is a weighted sum of the chosen experts for typical tokens, but not for "


def found(model: Moe, path: Path, seed: int, dynamic: bool = True) -> SourceModel:
    moe_spellings.export(model, path, seed, dynamic=dynamic)
    return load(path)


def refusal(source: SourceModel) -> str:
    (subgraph,) = [subgraph for subgraph in find_subgraphs(source) if subgraph.kind == "moe"]
    assert subgraph.unsupported is not None
    (entry,) = [entry for entry in plan_all(source, kinds=("moe",)).subgraphs if entry.kind == "moe"]
    assert entry.decision == "keep"
    assert subgraph.unsupported.text in entry.reason
    return subgraph.unsupported.text


def only_moe(source: SourceModel) -> parts.Moe:
    """The parts of the only MoE block, which can be replaced."""
    (subgraph,) = [subgraph for subgraph in find_subgraphs(source) if subgraph.kind == "moe"]
    assert subgraph.unsupported is None
    assert subgraph.moe is not None
    return subgraph.moe


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "fixed"])
@pytest.mark.parametrize(
    ("spec", "factors", "tokens"),
    [
        (MASK, doubtful, "router logits far apart"),
        (MASK, confident, "router logits close together"),
        (MoeSpec("mask", biases=True), unpadded, "tokens of zeros"),
    ],
    ids=["doubtful", "confident", "padding"],
)
def test_some_tokens(
    spec: MoeSpec, factors: Callable[..., Tensor], tokens: str, dynamic: bool, tmp_path: Path, seed: int
) -> None:
    source = found(Special(spec, seed, factors=factors), tmp_path / "model.onnx", seed, dynamic)
    assert FOR_TYPICAL + tokens in refusal(source)


def test_capacity(tmp_path: Path, seed: int) -> None:
    """Experts that take twelve tokens at most."""
    source = found(Special(MoeSpec("mask", experts=16), seed, factors=capacity), tmp_path / "model.onnx", seed)
    assert FOR_TYPICAL + "many tokens that prefer the same experts" in refusal(source)


def test_scale_of_a_single_expert(tmp_path: Path, seed: int) -> None:
    """Of 64, and so hardly chosen by a few typical tokens."""

    def scaled(chosen: Tensor, scores: Tensor, x: Tensor) -> Tensor:
        return torch.where(chosen == 41, 0.5, 1.0)

    source = found(Special(MoeSpec("mask", experts=64), seed, factors=scaled), tmp_path / "model.onnx", seed)
    assert "tokens" in refusal(source)


@pytest.mark.parametrize("place", ["routed", "y"])
def test_clamped_sum(place: str, tmp_path: Path, seed: int) -> None:
    """The block ends before a clamp that typical tokens do not reach; the clamp stays."""
    model = Special(MoeSpec("mask", shared=True), seed, **{place: lambda y: y.clamp(-50, 50)})
    source = found(model, tmp_path / "model.onnx", seed)
    assert (only_moe(source).shared is None) == (place == "routed")
    written = onnx.load(rewritten(source, plan_all(source, kinds=("moe",))).path)
    assert [node.op_type for node in written.graph.node if node.op_type in ("NVFP4MoE", "Clip")] == ["NVFP4MoE", "Clip"]
    x = 100 * torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)).numpy()
    if place == "y":
        (y,) = run(widen(written), x)
        assert np.abs(y).max() == 50


@pytest.mark.parametrize(
    ("changed", "operators"),
    [
        (lambda logits: 3 * torch.tanh(logits / 3), ["Div", "Tanh", "Mul"]),
        (lambda logits: logits.clamp(-10, 10), ["Clip"]),
        (lambda logits: logits / 0.5, ["Div"]),
        (lambda logits: logits * torch.linspace(0.5, 2, 4), ["Mul"]),
    ],
    ids=["softcap", "clamp", "temperature", "scales"],
)
def test_changed_logits(changed: Change, operators: list[str], tmp_path: Path, seed: int) -> None:
    """What is made of the router's output before it is scored stays, and the block reads that (Laguna)."""
    model = Special(MoeSpec("mask", shared=True), seed, logits=changed)
    source = found(model, tmp_path / "model.onnx", seed)
    assert only_moe(source).shared is not None
    path = rewritten(source, plan_all(source, kinds=("moe",))).path
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert [op for op in nodes if op in ("Div", "Tanh", "Mul", "Clip", "Softmax", "NVFP4MoE")] == [
        *operators,
        "NVFP4MoE",
    ]
    x = 3 * torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    assert_computes(path, moe_spellings.quantized_spelling(model), x)


def test_scaled_sum(tmp_path: Path, seed: int) -> None:
    """What the sum is multiplied by before the shared expert is added is in the block, and so is that (MiniMax-M3)."""
    model = Special(MoeSpec("mask", shared=True), seed, routed=lambda y: y * 2.5)
    source = found(model, tmp_path / "model.onnx", seed)
    moe = only_moe(source)
    assert moe.shared is not None
    assert moe.routing.scaling_factor == 2.5
    path = rewritten(source, plan_all(source, kinds=("moe",))).path
    assert "Mul" not in [node.op_type for node in onnx.load(path).graph.node]
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    assert_computes(path, moe_spellings.quantized_spelling(model), x)


class Normed(Moe):
    """The experts read what a norm in float32 gives, in the type of their weights (Gemma 4 in bfloat16)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, chosen = self.route(self.router(rows))
        normed = (F.normalize(rows.float()) * HIDDEN**0.5).type_as(x)
        return self._mask(normed, weights, chosen).view(x.shape)


def test_cast_that_experts_alone_read(tmp_path: Path, seed: int) -> None:
    model = Normed(MoeSpec("mask"), seed).half()
    source = found(model, tmp_path / "model.onnx", seed)
    path = rewritten(source, plan_all(source, kinds=("moe",))).path
    assert [node.op_type for node in onnx.load(path).graph.node if node.domain] == ["NVFP4MoE"]
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)).half()
    assert_computes(path, moe_spellings.quantized_spelling(model.float()), x, 5e-3)


class Shows(Moe):
    """A mixture of experts that computes something that is an output, too."""

    def __init__(self, seed: int, shown: str) -> None:
        super().__init__(MoeSpec("mask", shared=True), seed)
        self.shown = shown
        self.others = nn.ModuleList(Expert(self.spec, 48) for _ in self.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, HIDDEN)
        weights, chosen = self.route(self.router(rows))
        y = self._mask(rows, weights, chosen)
        if self.shown == "shared":
            assert self.shared is not None
            shared = self.shared(rows)
            return y + shared, shared
        if self.shown == "block":
            self.experts, experts = self.others, self.experts
            other = self._mask(rows, weights, chosen)
            self.experts = experts
            return y, other
        return y, {"chosen": chosen, "weights": weights, "expert": self.experts[2](rows)}[self.shown]


@pytest.mark.parametrize("shown", ["chosen", "weights", "expert", "shared", "block"])
def test_output(shown: str, tmp_path: Path, seed: int) -> None:
    """The reason names the tensor that is an output, and another block that shares the router."""
    source = found(Shows(seed, shown), tmp_path / "model.onnx", seed)
    reason = refusal(source)
    if shown == "block":
        assert "chooses among 4 experts, and the block has 8; NVFP4MoE serves one block per router" in reason
    else:
        output = onnx.load(source.path).graph.output[1].name
        assert f"'{output}' is also an output of the graph" in reason


def test_bias_that_is_not_a_number(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model.onnx"
    moe_spellings.export(Moe(MoeSpec("mask", biases=True), seed), path, seed)
    model = onnx.load(path)
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "experts.1.up.bias"]
    bias.CopyFrom(numpy_helper.from_array(np.full(48, np.nan, np.float32), bias.name))
    onnx.save(model, path)
    assert "bias 'experts.1.up.bias' holds NaN or Inf; repair the checkpoint" in refusal(load(path))


@pytest.mark.parametrize("starts", [0, -4], ids=["from-first", "from-last"])
def test_a_choice_behind_a_slice_that_leaves_all(starts: int, tmp_path: Path, seed: int) -> None:
    source = found(Special(MoeSpec("mask", experts=4), seed), tmp_path / "model.onnx", seed)
    model = onnx.load(source.path)
    (at,) = [index for index, node in enumerate(model.graph.node) if node.op_type == "TopK"]
    bounds = {"starts": starts, "ends": 4, "axes": -1}
    for name, bound in bounds.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([bound]), name))
    top_k = model.graph.node[at]
    model.graph.node.insert(at, onnx.helper.make_node("Slice", [top_k.input[0], *bounds], ["sliced"], "slice"))
    model.graph.node[at + 1].input[0] = "sliced"
    onnx.save(model, tmp_path / "sliced.onnx")
    (moe,) = [subgraph for subgraph in find_subgraphs(load(tmp_path / "sliced.onnx")) if subgraph.kind == "moe"]
    assert (moe.unsupported, moe.shapes["experts"]) == (None, 4)
