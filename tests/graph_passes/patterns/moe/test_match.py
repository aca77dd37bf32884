"""MoE blocks: found whatever their spelling, refused with a reason, rewritten to the quantized model."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from onnx_models import moe_spellings, moe_zoo
from onnx_models.graphs import run
from onnx_models.moe_spellings import (
    DISPATCHES,
    HIDDEN,
    Moe,
    MoeSpec,
    assert_computes,
    quantize_together,
    quantized_spelling,
)
from onnx_models.passes import EVERYTHING, in_16_bits, plan_all, replaceable, rewritten
from onnx_models.zoo import DTYPES, LAYERS
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings import trt_moe
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.trt_moe import function as native_function
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.graph_passes.subgraphs import values as weights
from trt_nvfp4.graph_passes.subgraphs.parts import Routing
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.moe_routing import route

SLOW = {"deepseek_v4", "ernie4_5_moe", "hy_v4"}
# Of many the exported original differs from Torch's: attention rounds to bfloat16 at other places.
BF16 = {"qwen3_moe", "mixtral", "olmoe", "flex_olmo", "llama4", "qwen2_moe"}
CASES = [
    pytest.param(
        name,
        exporter,
        dtype,
        id=f"{name}-{exporter}-{dtype}",
        marks=[]
        if (exporter, dtype) == (moe_zoo.fastest_exporter(name), "fp32") and name not in SLOW
        else [pytest.mark.slow],
    )
    for name in moe_zoo.MOE_ZOO
    for exporter, dtype in (
        (moe_zoo.fastest_exporter(name), "fp32"),
        *([("dynamo", "bf16")] if name in BF16 else []),
        *([("dynamo", "fp32")] if name not in BF16 and moe_zoo.fastest_exporter(name) != "dynamo" else []),
    )
]
Exported = tuple[torch.nn.Module, Callable[[int], torch.Tensor], Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Exported]:
    """The torch model, its input and its export, each exported once."""

    @functools.cache
    def get(name: str, exporter: str, dtype: str) -> Exported:
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        model, draw = moe_zoo.build(name, DTYPES[dtype])
        moe_zoo.export(model, draw(0), path, exporter)
        return model, draw, path

    return get


def moes(model: SourceModel) -> list[Subgraph]:
    return [subgraph for subgraph in find_subgraphs(model) if subgraph.kind == "moe"]


def quantized_transformers(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """A copy in float32 whose experts, routed and shared, hold quantized weights; one tensor scale per expert."""
    model = copy.deepcopy(model).float()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            for expert in parameter:
                quantize_together(expert.T if name in ("gpt_oss", "llama4") else expert)
    for key, module in model.named_modules():
        if name in moe_zoo.SHARED and key.endswith(("shared_expert", "shared_experts", "shared_mlp")):
            *first, down = [part.weight for part in module.children() if isinstance(part, nn.Linear)]
            quantize_together(*first)
            quantize_together(down)
    return model


@pytest.mark.parametrize(("name", "exporter", "dtype"), CASES)
def test_transformers(
    name: str, exporter: str, dtype: str, exported: Callable[[str, str, str], Exported], seed: int
) -> None:
    """Found with its routing, rewritten to the Torch model with quantized experts."""
    model, draw, path = exported(name, exporter, dtype)
    source = load(path)
    found = moes(source)
    shared, shared_gated = moe_zoo.SHARED.get(name, (0, False))
    sizes = {"in_features": 64, "intermediate_features": 48, "out_features": 64, "experts": 8, "gated": 1}
    sizes |= moe_zoo.SIZES.get(name, {})
    for subgraph in found:
        assert subgraph.unsupported is None
        assert subgraph.moe is not None
        assert subgraph.activation == moe_zoo.MOE_ZOO[name].activation
        assert subgraph.shapes == sizes | {"top_k": moe_zoo.ROUTING[name]["top_k"], "shared_features": shared}
        assert (subgraph.moe.shared_gate is not None) == shared_gated
        assert (subgraph.moe.routing.correction_bias is not None) == (name in moe_zoo.BIASED)
        expected = vars(Routing(**moe_zoo.ROUTING[name]))
        assert vars(subgraph.moe.routing) | {"correction_bias": None, "given": None} == expected
    assert len(found) == LAYERS
    if dtype == "fp32":
        assert replaceable(in_16_bits(source)) == replaceable(source)

    plan = plan_all(source, kinds=("moe",))
    assert {entry.op for entry in plan.subgraphs if entry.kind == "moe"} == {"NVFP4MoE"}
    result = rewritten(source, plan)
    written = onnx.load(result.path)
    onnx.checker.check_model(str(result.path))
    assert [node.op_type for node in written.graph.node if node.domain] == ["NVFP4MoE"] * LAYERS
    assert sum(node.op_type == "TopK" for node in written.graph.node) == LAYERS * (name in moe_zoo.INDEXED)
    assert result.weights_bytes_after < result.weights_bytes_before / 1.5

    x = draw(seed + 1)[:1, :5]  # another batch and another length than exported
    with torch.no_grad():
        expected_y = quantized_transformers(model, name)(x).numpy()
    (y,) = run(widen(written), x.numpy())
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=2e-5 * np.abs(expected_y).max())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in moe_zoo.MOE_ZOO
        if moe_zoo.ROUTING[name]["scoring"] != "given"  # the model's own nodes choose
    ],
)
def test_router_decisions(name: str, exported: Callable[[str, str, str], Exported], seed: int) -> None:
    """The op's routing chooses for the model's own logits the experts that the model's TopK chooses."""
    _, draw, path = exported(name, moe_zoo.fastest_exporter(name), "fp32")
    source = load(path)
    found = moes(source)
    nodes = {node.name: node for node in source.graph}
    written = onnx.load(rewritten(source, plan_all(source, kinds=("moe",))).path)
    ops = {node.name: node for node in written.graph.node if node.domain}
    biases = {tensor.name: tensor for tensor in written.graph.initializer}
    proto = onnx.load(source.path)
    choices = [[n for n in map(nodes.get, subgraph.nodes) if n.op_type == "TopK"][-1] for subgraph in found]  # type: ignore[union-attr]
    names = [v for s, c in zip(found, choices, strict=True) for v in (s.moe.logits.name, c.outputs[1].name)]  # type: ignore[union-attr]
    proto.graph.output.extend(onnx.ValueInfoProto(name=value) for value in names)
    _, *values = run(proto, torch.cat([draw(seed + index) for index in range(16)]).numpy())
    for subgraph, logits, chosen in zip(found, values[::2], values[1::2], strict=True):
        node = ops[subgraph.name]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        keys = ("top_k", "scoring", "renormalize", "scaling_factor", "n_group", "topk_group", "group_score_top")
        bias = torch.from_numpy(numpy_helper.to_array(biases[node.input[2]]).copy())
        experts, _ = route(torch.from_numpy(logits), bias, **{key: attributes[key] for key in keys})
        np.testing.assert_array_equal(np.sort(experts.numpy(), 1), np.sort(chosen.reshape(experts.shape), 1))


SPELLINGS = [
    *(MoeSpec(dispatch) for dispatch in DISPATCHES),
    *(MoeSpec(dispatch, scoring="sigmoid", shared=True, factor=2.5) for dispatch in DISPATCHES),
    *(MoeSpec(dispatch, scoring="sqrt_softplus", shared=True, factor=1.5) for dispatch in ("loop", "gathered")),
    *(MoeSpec(dispatch, scoring="given", renormalize=False, factor=1.5) for dispatch in ("loop", "gathered")),
    MoeSpec("gathered", scoring="given", renormalize=False, top_k=4),  # weights of either sign
    *(MoeSpec(dispatch, biases=True, renormalize=False) for dispatch in ("loop", "mask", "stack")),
    *(MoeSpec(dispatch, gated=False, activation="relu2", top_k=1) for dispatch in ("loop", "scatter")),
    MoeSpec("loop", experts=7, top_k=7),
    *(MoeSpec(dispatch, biases=True, expert_scales=True) for dispatch in ("loop", "scatter")),
    *(MoeSpec(dispatch, own_input=True, shared=True) for dispatch in ("loop", "gathered")),
    MoeSpec("gathered", own_input=True, expert_scales=True, factor=2.5),
]


@pytest.mark.parametrize("spec", SPELLINGS, ids=str)
def test_spellings(spec: MoeSpec, tmp_path: Path, seed: int) -> None:
    """Loops over experts, masks, dense sums, gathered weights: one plugin node that computes the quantized block."""
    model = Moe(spec, seed)
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    (subgraph,) = moes(source)
    assert subgraph.unsupported is None
    assert subgraph.moe is not None
    assert (subgraph.moe.shared is not None) == spec.shared
    assert subgraph.moe.routing.scoring == spec.scoring
    assert subgraph.moe.routing.scaling_factor == spec.factor
    assert [s for s in find_subgraphs(source) if s.kind not in ("moe", "linear")] == []
    result = rewritten(source, plan_all(source, kinds=("moe",)))
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    assert_computes(result.path, quantized_spelling(model), x)


class Projected(Moe):
    """The experts read what a linear makes of the router's input, after the router, as rows of `width` (Muse Spark, the
    latent experts of Nemotron-H)."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__(MoeSpec("gathered"), seed)
        self.before = nn.Linear(HIDDEN, width, bias=False)
        self.after = nn.Linear(width, HIDDEN, bias=False)
        for name in ("gate", "up"):
            setattr(self, f"stacked_{name}", nn.Parameter(getattr(self, f"stacked_{name}")[:, :width].clone()))
        self.stacked_down = nn.Parameter(self.stacked_down[..., :width].clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, chosen = self.route(self.router(rows))
        return self.after(self._gathered(self.before(rows), weights, chosen)).view(x.shape)


@pytest.mark.parametrize("width", [HIDDEN, HIDDEN // 2])
def test_experts_that_read_a_linear(width: int, tmp_path: Path, seed: int) -> None:
    """All are replaced, one reading the other."""
    model = Projected(seed, width)
    moe_spellings.export(model, tmp_path / "model.onnx", seed)
    result = rewritten(load(tmp_path / "model.onnx"))
    ops = [node.op_type for node in onnx.load(result.path).graph.node if node.domain]
    assert ops == ["NVFP4Linear", "NVFP4MoE", "NVFP4Linear"]
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    quantized = quantized_spelling(model)
    for linear in (quantized.before, quantized.after):
        quantize_together(linear.weight)
    assert_computes(result.path, quantized, x)


def test_plan(tmp_path: Path, seed: int) -> None:
    """The file says what was found; other precisions keep the block and say why; the router is never quantized."""
    moe_spellings.export(Moe(MoeSpec(shared=True), seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    plan = make_plan(source, find_subgraphs(source), EVERYTHING, PlanOptions(kinds=("moe", "linear"), calibrated=True))
    block, router = plan.subgraphs
    assert (block.kind, block.decision, block.op) == ("moe", "nvfp4_w4a4", "NVFP4MoE")
    assert block.shapes["experts"] == 4
    assert (router.kind, router.decision) == ("linear", "keep")
    assert "rounding its weights could choose other experts" in router.reason
    plan.save(tmp_path / "plan.yaml")
    reread = Plan.load(tmp_path / "plan.yaml")
    assert [vars(e) | {"line": 0} for e in reread.subgraphs] == [vars(e) for e in plan.subgraphs]
    assert len(reread.check(source)) == 2
    (entry, _) = plan_all(source, "fp8", kinds=("moe",)).subgraphs
    assert entry.decision == "bf16"
    assert "FP8MoE has no kernels of its own for everything" in entry.reason


def test_4_bit_activations(tmp_path: Path, seed: int) -> None:
    """One tensor scale for what all experts read, from the largest statistic of any."""
    moe_spellings.export(Moe(MoeSpec(shared=True), seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    plan = plan_all(source, calibrated=True, kinds=("moe",))
    names = list(calibration_tensors(plan))
    (subgraph,) = moes(source)
    inputs = {linear.x.name for mlp in subgraph.moe.experts for linear in mlp.linears[:-1]}  # type: ignore[union-attr]
    amax = {name: 2.0 + index / 100 + (10 if name in inputs else 0) for index, name in enumerate(names)}
    largest = [max(value for value in amax.values() if (value > 10) == is_input) for is_input in (True, False)]
    written = onnx.load(rewritten(source, plan, Statistics(amax, 1)).path)
    (node,) = [node for node in written.graph.node if node.domain]
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    scales = [float(tensors[name]) for name in node.input[-2:]]
    np.testing.assert_allclose(scales, [value / 2688 for value in largest], rtol=1e-6)
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute}["quantize_activations"] == 1


def closest_choice(path: Path, x: np.ndarray) -> float:
    """By how much the least score that a router takes is above the next one, at least, in the original model."""
    model = onnx.load(path)
    choices = [node for node in model.graph.node if node.op_type == "TopK"]
    del model.graph.output[:]
    for name in [name for node in choices for name in (node.input[0], node.output[0])]:
        model.graph.output.append(helper.make_empty_tensor_value_info(name))
    found = run(model, x)
    margin = np.inf
    for scores, taken in zip(found[::2], found[1::2], strict=True):
        least, others = taken.shape[-1], scores.shape[-1] - taken.shape[-1]
        if others:  # not so where a group counts by its two best and has no more
            ranked = np.sort(scores, -1)
            margin = min(margin, float((ranked[..., -least] - ranked[..., others - 1]).min()))
    return margin


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama4"])
def test_16_bits(name: str, exported: Callable[[str, str, str], Exported], seed: int) -> None:
    """Experts of a float32 model in float16, stacked weights converted; routing stays in float32."""
    _, draw, path = exported(name, moe_zoo.fastest_exporter(name), "fp32")
    source = load(path)
    plan = plan_all(source, "bf16", kinds=("moe",))
    for entry in plan.subgraphs:
        assert entry.decision == ("bf16" if entry.kind == "moe" else "keep")
        entry.decision = "fp16" if entry.kind == "moe" else "keep"  # ONNX Runtime has no kernels for bfloat16
    result = rewritten(source, plan)
    onnx.checker.check_model(str(result.path), full_check=True)
    written = onnx.load(result.path)
    assert {t.data_type for t in written.graph.initializer if len(t.dims) == 3} == {onnx.TensorProto.FLOAT16}
    # Rounded experts decide the next router's near ties otherwise: seen up to a difference of 1.3e-4.
    x = next(x for n in range(50) if closest_choice(path, x := draw(seed + n).numpy()) > 1e-3)
    (expected,), (y,) = run(path, x), run(written, x)
    assert not np.array_equal(y, expected)
    np.testing.assert_allclose(y, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("dispatch", ["loop", "gathered", "dense"])
@pytest.mark.parametrize(
    ("dtype", "opset", "dynamic"), [("fp16", 14, True), ("fp32", 17, False), ("fp32", 9, True), ("fp32", 12, False)]
)
def test_other_exports(dispatch: str, dtype: str, opset: int, dynamic: bool, tmp_path: Path, seed: int) -> None:
    """Older opsets, 16-bit weights, sizes fixed."""
    model = Moe(MoeSpec(dispatch, shared=True), seed).to(DTYPES[dtype])
    moe_spellings.export(model, tmp_path / "model.onnx", seed, opset, dynamic)
    source = load(tmp_path / "model.onnx")
    (subgraph,) = moes(source)
    assert subgraph.unsupported is None
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randn(2, 5, HIDDEN, generator=generator).to(DTYPES[dtype]) for _ in range(50))
    # In float16 a router decides near ties otherwise.
    x = next(x for x in draws if closest_choice(tmp_path / "model.onnx", x.numpy()) > 2e-3)
    assert_computes(
        rewritten(source, plan_all(source, kinds=("moe",))).path, quantized_spelling(model.float()), x, 5e-3
    )


TRT_MOE = replace(EVERYTHING, trt_moe=True)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen2_moe"])
def test_native_layer(name: str, exported: Callable[[str, str, str], Exported], seed: int) -> None:
    """TRT_MoE behind a router in standard operators computes what the model computes; shared experts stay."""
    _, draw, path = exported(name, "torchscript", "fp32")
    source = load(path)
    plan = make_plan(source, find_subgraphs(source), TRT_MOE, PlanOptions(kinds=("moe",), moe="trt_moe"))
    reasons = {entry.reason for entry in plan.subgraphs if entry.kind == "moe"}
    assert all(
        reason.startswith("TensorRT's MoE layer computes in 16 bits, the model in float32") for reason in reasons
    )
    check_native_layers(path, LAYERS, draw(seed))


def check_native_layers(path: Path, count: int, x: Tensor) -> None:
    """In float32 after all: ONNX Runtime has no 16-bit kernels to compare with."""
    source = load(path)
    for subgraph in moes(source):
        trt_moe.lower(LoweringContext(source.ir_model), subgraph)
    model = ir.serde.serialize_model(source.ir_model)
    model.functions.append(native_function(source.opset))
    model.opset_import.append(helper.make_opsetid("trt", 1))
    assert sum(node.op_type == "TRT_MoE" for node in model.graph.node) == count
    (expected,), (y,) = run(path, x.numpy()), run(model, x.numpy())
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_native_layer_behind_square_roots_of_softplus(tmp_path: Path, seed: int) -> None:
    spec = MoeSpec("gathered", scoring="sqrt_softplus", shared=True, factor=1.5)
    moe_spellings.export(Moe(spec, seed), tmp_path / "model.onnx", seed)
    x = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(seed))
    check_native_layers(tmp_path / "model.onnx", 1, 10 * x)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MoeSpec(gated=False), "gated experts with silu, these are silu, without a gate"),
        (MoeSpec(biases=True), "its experts have biases"),
        (MoeSpec(scoring="given", renormalize=False), "weighs its experts by others"),
        (MoeSpec(), "computes in 16 bits, the model in float32"),
    ],
    ids=str,
)
def test_native_layer_does_not_serve(spec: MoeSpec, reason: str, tmp_path: Path, seed: int) -> None:
    """The plugin does instead, and the plan says why."""
    moe_spellings.export(Moe(spec, seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    (entry, _) = make_plan(
        source, find_subgraphs(source), TRT_MOE, PlanOptions(kinds=("moe",), moe="trt_moe")
    ).subgraphs
    assert entry.decision == "nvfp4_w4a16"
    assert reason in entry.reason


def test_experts_are_quantized_one_by_one(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From external data, a few rows of one expert at a time; the same bytes as all at once."""
    monkeypatch.setattr("trt_nvfp4.graph_passes.ir.save._INLINE_BYTES", 64)
    model = Moe(MoeSpec("gathered"), seed)
    moe_spellings.export(model, tmp_path / "inline.onnx", seed)
    proto = onnx.load(tmp_path / "inline.onnx")
    onnx.save(proto, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=64)
    source = load(tmp_path / "model.onnx")
    plan = plan_all(source, kinds=("moe",))
    whole = rewritten(source, plan).path
    first = whole.read_bytes(), whole.with_name(f"{whole.name}.data").read_bytes()
    largest = 0
    chunks = weights.Matrix.chunks

    def watched(self: weights.Matrix) -> object:
        nonlocal largest
        for chunk in chunks(self):
            largest = max(largest, chunk.numel())
            yield chunk

    monkeypatch.setattr(weights.Matrix, "chunks", watched)
    monkeypatch.setattr(weights, "_CHUNK_VALUES", 200)
    small = rewritten(source, plan).path
    assert (small.read_bytes(), small.with_name(f"{small.name}.data").read_bytes()) == first
    assert 0 < largest <= 200
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(small).graph.initializer}
    (node,) = [node for node in onnx.load(small).graph.node if node.domain]
    inputs = dict(zip([f.name for f in OPS["NVFP4MoE"].inputs], node.input, strict=True))
    for index in range(4):
        packed, _, scale = nvfp4.quantize(model.stacked_down[index].T.contiguous())
        assert tensors[inputs["down_tensor_scale"]][index] == scale
        np.testing.assert_array_equal(tensors[inputs["down_weight"]][index], packed.view(torch.int8))
