"""An MoE block that a graph calls twice, or experts with two routers: their weights are made once."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from onnx_models import moe_spellings
from onnx_models.graphs import run
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, quantized_spelling
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings import trt_moe
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.trt_moe import function as native_function
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.rewrite import RewriteResult, calibration_tensors
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.weights.quantization import weight_readers
from trt_nvfp4.plugins.ops import OPS

# Loops over experts with matrices of their own, and stacked matrices.
SPECS = [MoeSpec("loop", shared=True, biases=True), MoeSpec("gathered"), MoeSpec("dense", shared=True)]


class Twice(nn.Module):
    """The same experts behind two norms and, where `own_routers`, two routers."""

    def __init__(self, moe: Moe, own_routers: bool = False) -> None:
        super().__init__()
        self.moe = moe
        self.router, second = moe.router, nn.Linear(HIDDEN, moe.spec.experts, bias=False)
        self.routers = nn.ModuleList([moe.router, second if own_routers else moe.router])
        self.norms = nn.ParameterList(torch.rand(HIDDEN) * 4 + 0.1 for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.call(0, x)
        second = self.call(1, torch.tanh(first) * 2)
        self.moe.router = self.routers[0]  # as it was: the exporter wants the module's state unchanged
        return first, second

    def call(self, index: int, x: Tensor) -> Tensor:
        self.moe.router = self.routers[index]
        y: Tensor = self.moe(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norms[index])
        return y


def exported(model: Twice | Moe, path: Path, seed: int) -> SourceModel:
    moe_spellings.export(model, path, seed)
    return load(path)


def lowered(source: SourceModel, decision: str) -> RewriteResult:
    plan = plan_all(source, kinds=("moe",))
    for entry in plan.subgraphs:
        if entry.kind == "moe":
            entry.decision = decision
    return rewritten(source, plan)


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 7, HIDDEN)).astype(np.float32)


def reads_in_common(nodes: list[onnx.NodeProto], op: str) -> set[str]:
    """The formal inputs for which all `nodes` read one and the same tensor."""
    names = [formal.name for formal in OPS[op].inputs]
    return {name for i, name in enumerate(names) if len({node.input[i] for node in nodes}) == 1}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nvfp4(spec: MoeSpec, tmp_path: Path, seed: int) -> None:
    """Both calls compute with the quantized experts, which are written once."""
    model = Twice(Moe(spec, seed))
    source = exported(model, tmp_path / "model.onnx", seed)
    result = lowered(source, "nvfp4_w4a16")
    nodes = [node for node in onnx.load(result.path).graph.node if node.domain]
    assert [node.op_type for node in nodes] == ["NVFP4MoE"] * 2
    experts = {f"{part}_{what}" for part in ("gate_up", "down") for what in ("weight", "scales", "tensor_scale")}
    shared = {f"shared_{name}" for name in experts} if spec.shared else set()
    assert experts | shared <= reads_in_common(nodes, "NVFP4MoE")
    x = draw(seed + 1)
    quantized = quantized_spelling(model.moe)
    model.moe, model.routers = quantized, nn.ModuleList([quantized.router] * 2)
    with torch.no_grad():
        expected = [y.numpy() for y in model(torch.from_numpy(x))]
    for found, right in zip(run(result.path, x), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("decision", ["fp8", "fp16"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_other_precisions(spec: MoeSpec, decision: str, tmp_path: Path, seed: int) -> None:
    model = Twice(Moe(spec, seed))
    result = lowered(exported(model, tmp_path / "model.onnx", seed), decision)
    assert result.weights_bytes_after < 0.55 * result.weights_bytes_before
    nodes = [node for node in onnx.load(result.path).graph.node if node.domain]
    assert [node.op_type for node in nodes] == ["FP8MoE"] * (2 if decision == "fp8" else 0)
    if decision == "fp8":
        experts = {f"{part}_{what}" for part in ("gate_up", "down") for what in ("weight", "scale")}
        shared = {f"shared_{name}" for name in experts} if spec.shared else set()
        assert experts | shared <= reads_in_common(nodes, "FP8MoE")
    x = draw(seed + 1)
    with torch.no_grad():
        expected = [y.numpy() for y in model(torch.from_numpy(x))]
    # Weights or scales in the wrong place give errors near one; a near tie of the router decides otherwise for a token.
    for found, right in zip(run(result.path, x), expected, strict=True):
        errors = np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1)
        assert 0 < np.median(errors) < (0.25 if decision == "fp8" else 0.01)


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_native_layers(spec: MoeSpec, tmp_path: Path, seed: int) -> None:
    """TensorRT's own layer, in float32 here, reads one stack of matrices in both calls."""
    source = exported(Twice(Moe(MoeSpec(spec.dispatch), seed)), tmp_path / "model.onnx", seed)
    expected = run(source.path, x := draw(seed + 1))
    context = LoweringContext(source.ir_model)
    for subgraph in reversed(find_subgraphs(source)):
        if isinstance(subgraph, MoeSubgraph):
            trt_moe.lower(context, subgraph)
    model = ir.serde.serialize_model(source.ir_model)
    model.functions.append(native_function(source.opset))
    model.opset_import.append(helper.make_opsetid("trt", 1))
    nodes = [node for node in model.graph.node if node.op_type == "TRT_MoE"]
    assert len(nodes) == 2
    assert nodes[0].input[3:] == nodes[1].input[3:]
    for found, right in zip(run(model, x), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("dispatch", ["loop", "gathered"])
def test_weights_are_made_for_the_inputs_of_both(dispatch: str, tmp_path: Path, seed: int) -> None:
    source = exported(Twice(Moe(MoeSpec(dispatch), seed)), tmp_path / "model.onnx", seed)
    readers = weight_readers(source.graph)
    first, second = (part for part in find_subgraphs(source) if isinstance(part, MoeSubgraph))
    for one, other in zip(first.linears, second.linears, strict=True):
        assert one.weight.identity == other.weight.identity
        assert one.x is not other.x
        assert readers[one.weight.stored] == [one.x.name, other.x.name]


@pytest.mark.parametrize(
    ("dispatch", "kept"), [("loop", None), ("gathered", None), ("gathered", 0), ("dense", 1)], ids=str
)
def test_awq_leaves_them(dispatch: str, kept: int | None, tmp_path: Path, seed: int) -> None:
    """Scales that suit one norm, or one router's tokens, would be wrong for the other's."""
    source = exported(Twice(Moe(MoeSpec(dispatch), seed), own_routers=True), tmp_path / "model.onnx", seed)
    plan = plan_all(source, kinds=("moe",), recipe="mse+awq")
    blocks = [entry for entry in plan.subgraphs if entry.kind == "moe"]
    for entry in blocks:
        assert "is used more than once" in entry.reason
    if kept is not None:
        blocks[kept].decision = "keep"
    x = draw(seed + 1)
    result = rewritten(source, plan, collect(source.path, calibration_tensors(plan), [{"x": x}]))
    for found, right in zip(run(result.path, x), run(source.path, x), strict=True):
        errors = np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1)
        assert np.median(errors) < 0.6
