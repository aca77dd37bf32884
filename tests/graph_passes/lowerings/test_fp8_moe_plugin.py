"""MoE blocks as FP8 plugin nodes: chosen where the target has kernels for them, and the same values as FP8 by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from onnx_models import moe_spellings
from onnx_models.graphs import run
from onnx_models.moe_spellings import HIDDEN, Expert, Moe, MoeSpec
from onnx_models.passes import EVERYTHING, plan_all, rewritten
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel, load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.plugins.ops import OPS

HOPPER = Capabilities("h200", nvfp4_w4a16=True, fp8=True, fp8_plugins=True)


def exported(model: Moe, folder: Path, seed: int) -> SourceModel:
    moe_spellings.export(model, folder / "model.onnx", seed)
    return load(folder / "model.onnx")


def in_fp8(source: SourceModel, calibrated: bool) -> Plan:
    plan = plan_all(source, kinds=("moe",), calibrated=calibrated)
    for entry in plan.subgraphs:
        if entry.kind == "moe":
            entry.decision = "fp8"  # and its op is that of the decision before
    return plan


def interleaved(expert: Expert) -> torch.Tensor:
    if expert.gate is None:
        return expert.up.weight
    return torch.stack((expert.gate.weight, expert.up.weight), 1).flatten(0, 1)


def test_a_plan_may_ask_for_it_where_it_is_slow(tmp_path: Path, seed: int) -> None:
    source = exported(Moe(MoeSpec("loop"), seed), tmp_path, seed)
    assert in_fp8(source, False).check(source, Capabilities("ada", nvfp4_w4a16=True, fp8=True))


@pytest.mark.parametrize("calibrated", [False, True], ids=["scales at run time", "calibrated"])
@pytest.mark.parametrize(
    "spec",
    [
        MoeSpec("loop", biases=True, shared=True, scoring="sigmoid", factor=2.5),
        MoeSpec("gathered", experts=6, top_k=3),
        MoeSpec("gathered", scoring="cos", renormalize=False),  # the model's own nodes choose
        MoeSpec("scatter", gated=False, activation="relu2", top_k=1),
    ],
    ids=str,
)
def test_values(spec: MoeSpec, calibrated: bool, tmp_path: Path, seed: int) -> None:
    model = Moe(spec, seed)
    source = exported(model, tmp_path, seed)
    plan = in_fp8(source, calibrated)
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 8.0), 1) if calibrated else None
    result = rewritten(source, plan, statistics)
    onnx.checker.check_model(result.path)
    written = onnx.load(result.path)
    (node,) = [node for node in written.graph.node if node.domain]
    assert node.op_type == "FP8MoE"
    assert result.realized[node.name] == [node.name]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["static_scales"] == int(calibrated)

    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    names = [formal.name for formal in OPS["FP8MoE"].inputs]
    inputs = {formal: tensors[name] for formal, name in zip(names, node.input, strict=True) if name in tensors}
    assert inputs["input_scale"] == inputs["hidden_scale"] == (np.float32(8 / 448) if calibrated else 0)
    for key, weight in (("gate_up", interleaved), ("down", lambda expert: expert.down.weight)):
        original = torch.stack([weight(expert) for expert in model.experts]).detach()
        values = torch.from_numpy(inputs[f"{key}_weight"].copy()).view(torch.float8_e4m3fn).float()
        scale = torch.from_numpy(inputs[f"{key}_scale"].copy())
        torch.testing.assert_close(scale, original.abs().amax(-1) / 448)
        assert ((values * scale[..., None] - original).abs() <= original.abs() / 16 + scale[..., None] / 1024).all()

    x = np.random.default_rng(seed).standard_normal((3, 7, HIDDEN)).astype(np.float32)
    (expected,), (found,) = run(source.path, x), run(result.path, x)
    # Three roundings to four bits each; a scale or a row in the wrong place gives errors near one.
    assert np.linalg.norm(found - expected) <= 0.15 * np.linalg.norm(expected)


def decided(source: SourceModel, capabilities: Capabilities, **options: Any) -> tuple[str, str, str]:
    plan = make_plan(
        source, find_subgraphs(source), capabilities, PlanOptions(precision="fp8", kinds=("moe",), **options)
    )
    (entry,) = [entry for entry in plan.subgraphs if entry.kind == "moe"]
    return entry.decision, entry.op, entry.reason


def test_only_where_the_target_has_kernels(tmp_path: Path, seed: int) -> None:
    source = exported(Moe(MoeSpec(), seed).half(), tmp_path, seed)
    assert decided(source, HOPPER, calibrated=True) == ("fp8", "FP8MoE", "FP8, calibrated activation scales")
    decision, op, reason = decided(source, EVERYTHING)
    assert (decision, op) == ("keep", "")
    assert "FP8MoE has no kernels of its own for everything" in reason


def test_float32_goes_on_to_16_bits(tmp_path: Path, seed: int) -> None:
    decision, _, reason = decided(exported(Moe(MoeSpec(), seed), tmp_path, seed), HOPPER)
    assert decision == "bf16"
    assert "FP8MoE has no kernels of its own for float32 activations" in reason


@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_without_a_gate_are_slow_in_fp8(calibrated: bool, tmp_path: Path, seed: int) -> None:
    spec = MoeSpec("scatter", gated=False, activation="relu2", top_k=1)
    source = exported(Moe(spec, seed).half(), tmp_path, seed)
    obstacle = "FP8MoE has no kernels of its own for experts without a gate"
    subgraphs = find_subgraphs(source)
    for tokens in (1, 10_000):
        rows = {subgraph.name: tokens for subgraph in subgraphs}
        plan = make_plan(source, subgraphs, HOPPER, PlanOptions(calibrated=calibrated, tokens=rows))
        (entry,) = [entry for entry in plan.subgraphs if entry.kind == "moe"]
        assert (entry.decision, entry.op) == ("nvfp4_w4a16", "NVFP4MoE")
        assert "W4A16, float16 activations" in entry.reason
        assert "faster than NVFP4" not in entry.reason
        assert (obstacle in entry.reason) == (tokens > 1)
    decision, _, reason = decided(source, HOPPER, calibrated=calibrated)
    assert decision == "keep"
    assert obstacle in reason
    assert in_fp8(source, calibrated).check(source, HOPPER), "a plan may ask for it"


def test_weights_that_are_no_numbers(tmp_path: Path, seed: int) -> None:
    model = Moe(MoeSpec(), seed)
    model.experts[2].down.weight.data[3, 5] = torch.nan
    source = exported(model, tmp_path, seed)
    with pytest.raises(ModelError, match="holds NaN or Inf and cannot be quantized"):
        rewritten(source, in_fp8(source, False))
