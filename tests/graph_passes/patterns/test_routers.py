"""What the model chooses by is not rounded, whether or not a mixture of experts is recognised behind it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from onnx_models import moe_spellings
from onnx_models.graphs import run
from onnx_models.moe_spellings import Moe, MoeSpec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.planning.kinds.registry import DEFAULT_KINDS

HIDDEN, EXPERTS = 32, 8


class Chooses(nn.Module):
    """Experts of one matrix, which no MLP is: chosen by `choice` from the scores of a router of some layers."""

    def __init__(self, choice: str, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = [HIDDEN, *[64] * (layers - 1), EXPERTS]
        parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.router = nn.Sequential(*parts[:-1])
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.choice = choice

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.choice in ("ArgMax", "ArgMin"):
            chosen = scores.argmax(-1) if self.choice == "ArgMax" else scores.argmin(-1)
            return (x[:, None] @ self.experts[chosen])[:, 0]
        weights, chosen = scores.topk(2, -1, largest=self.choice == "TopK")
        y: Tensor = (weights[..., None, None] * (x[:, None, None] @ self.experts[chosen])).sum((1, 2))
        return y


class WithShared(Chooses):
    """The router scores a shared expert too, which is always taken (Inkling)."""

    def __init__(self, seed: int) -> None:
        super().__init__("TopK", 1, seed)
        self.router = nn.Linear(HIDDEN, EXPERTS + 1)
        self.shared = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        weights, chosen = scores[:, :-1].topk(2, -1)
        y: Tensor = (weights[..., None, None] * (x[:, None, None] @ self.experts[chosen])).sum((1, 2))
        return y + scores[:, -1:] * (x @ self.shared)


class Reports(nn.Module):
    """What it chooses is for the caller alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = self.head(x).topk(2, -1)
        return values, chosen.to(torch.int32)


def exported(model: nn.Module, path: Path) -> SourceModel:
    torch.onnx.export(
        model.eval(),
        (torch.randn(16, HIDDEN),),
        path,
        input_names=["x"],
        dynamo=False,
        opset_version=17,
        dynamic_axes={"x": [0]},
    )
    return load(path)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("choice", ["TopK", "TopK of the smallest", "ArgMax", "ArgMin"])
def test_choices_stay_the_models_own(choice: str, layers: int, tmp_path: Path, seed: int) -> None:
    model = Chooses(choice, layers, seed)
    source = exported(model, tmp_path / "model.onnx")
    plan = plan_all(source)
    assert sum({"linear": 1, "mlp": 2}[entry.kind] for entry in plan.subgraphs) == layers
    for entry in plan.subgraphs:
        assert entry.decision == "keep"
        assert f"({choice.split()[0]}) selects weights by its result" in entry.reason
    x = torch.randn(512, HIDDEN)
    (y,) = run(rewritten(source, plan).path, x.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(y, model(x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatch", ["loop", "gathered"])
def test_a_deep_router_of_a_mixture(dispatch: str, tmp_path: Path, seed: int) -> None:
    model = Moe(MoeSpec(dispatch), seed)
    model.router = nn.Sequential(model.router, nn.ReLU(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    moe, *router = sorted(plan_all(load(tmp_path / "model.onnx")).subgraphs, key=lambda entry: entry.kind != "moe")
    assert (moe.kind, moe.decision) == ("moe", "nvfp4_w4a16")
    assert [(entry.kind, entry.decision) for entry in router] == [("mlp", "keep"), ("linear", "keep")]
    assert all("it belongs to a router" in entry.reason for entry in router)


def test_a_choice_from_a_part_of_the_scores(tmp_path: Path, seed: int) -> None:
    source = exported(WithShared(seed), tmp_path / "model.onnx")
    router, shared = plan_all(source).subgraphs
    assert (router.decision, shared.decision) == ("keep", "nvfp4_w4a16")
    assert "(TopK) selects weights by its result" in router.reason
    assert plan_all(source, kinds=DEFAULT_KINDS).subgraphs[0].reason in router.reason


def test_what_only_the_caller_chooses_by_is_quantized(tmp_path: Path, seed: int) -> None:
    (entry,) = plan_all(exported(Reports(seed), tmp_path / "model.onnx")).subgraphs
    assert entry.decision == "nvfp4_w4a16"


class Policy(nn.Module):
    """Three MLPs and a head whose ArgMax selects values: none, action bins, rows of an embedding, tokens to keep."""

    def __init__(self, end: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.end = end
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, HIDDEN))
            for _ in range(3)
        )
        self.head = nn.Linear(HIDDEN, EXPERTS)
        self.register_buffer("bins", torch.linspace(-1, 1, EXPERTS))
        self.embedding = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        chosen = logits.argmax(-1)
        if self.end == "bins":
            return logits, self.bins[chosen] * 0.5 + 1
        if self.end == "embedding":
            return logits, self.blocks[0](x + self.embedding[chosen])
        if self.end == "confident rows":
            keep = (chosen != 0) & (chosen != torch.roll(chosen, 1, 0))
            best = torch.where(keep, logits.softmax(-1).amax(-1), torch.zeros(()))
            return best, x[keep.nonzero()[:, 0]]
        return logits, chosen


@pytest.mark.parametrize("end", ["plain", "bins", "embedding", "confident rows"])
def test_a_choice_of_values_is_no_router(end: str, tmp_path: Path, seed: int) -> None:
    """Heads of policies, labels, greedy CTC: classes, not experts."""
    plan = plan_all(exported(Policy(end, seed), tmp_path / "model.onnx"))
    assert {entry.decision for entry in plan.subgraphs} == {"nvfp4_w4a16"}
    assert all("selects weights" not in entry.reason for entry in plan.subgraphs)


def test_a_plan_may_quantize_a_router(tmp_path: Path, seed: int) -> None:
    """What it asks for is done."""
    source = exported(Chooses("ArgMax", 3, seed), tmp_path / "model.onnx")
    plan = plan_all(source)
    assert [entry.decision for entry in plan.subgraphs] == ["keep"] * len(plan.subgraphs)
    for entry in plan.subgraphs:
        entry.decision = "nvfp4_w4a16"
    model = onnx.load(rewritten(source, plan).path)
    assert {node.name for node in model.graph.node if node.domain} == {entry.name for entry in plan.subgraphs}


class WithTemperature(Moe):
    """Its logits are multiplied by the softplus of a parameter, one number."""

    def __init__(self, spec: MoeSpec, seed: int) -> None:
        super().__init__(spec, seed)
        self.temperature = nn.Parameter(torch.tensor(4.0))

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(logits * nn.functional.softplus(self.temperature), self.spec.top_k, -1)
        return weights.softmax(-1), chosen


def test_a_learned_temperature(tmp_path: Path, seed: int) -> None:
    """It is part of the block that is found: what replaces it weighs the experts as the model does."""
    moe_spellings.export(WithTemperature(MoeSpec(), seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    plan = plan_all(source, kinds=("moe",))
    (moe,) = [entry for entry in plan.subgraphs if entry.kind == "moe"]
    assert (moe.decision, moe.op) == ("nvfp4_w4a16", "NVFP4MoE")
    result = rewritten(source, plan)
    x = np.random.default_rng(seed).standard_normal((3, 40, moe_spellings.HIDDEN)).astype(np.float32)
    (expected,), (found,) = run(source.path, x), run(result.path, x)
    moe_spellings.export(Moe(MoeSpec(), seed), tmp_path / "plain.onnx", seed)
    (without,) = run(tmp_path / "plain.onnx", x)
    size = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) < 0.2 * size < np.linalg.norm(without - expected)
