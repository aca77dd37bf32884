"""Experts from NVFP4 checkpoints, in both conventions: the published bytes, no other."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

from onnx_models import moe_zoo
from onnx_models.graphs import run
from onnx_models.passes import plan_all
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.rewrite import rewrite
from trt_nvfp4.graph_passes.subgraphs.parts import Weight
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.weights.checkpoint_experts import PackedExperts
from trt_nvfp4.graph_passes.weights.checkpoint_weights import NVFP4Source, common_scale
from trt_nvfp4.plugins.ops import OPS

Tensors = dict[str, torch.Tensor]
MODELOPT, COMPRESSED = "modelopt", "compressed-tensors"


def publish(tensors: Tensors, module: str, weight: torch.Tensor, scale: torch.Tensor, convention: str) -> torch.Tensor:
    """Adds a quantized weight to a checkpoint; returns its values."""
    packed, block_scales, _ = nvfp4.quantize(weight.contiguous(), scale)
    tensors[f"{module}.weight_scale"] = block_scales
    if convention == MODELOPT:
        tensors |= {f"{module}.weight": packed, f"{module}.weight_scale_2": scale.clone()}
        tensors[f"{module}.input_scale"] = torch.tensor(0.01 + 0.001 * len(tensors))
    else:
        tensors |= {f"{module}.weight_packed": packed, f"{module}.weight_global_scale": scale.reciprocal()}
        scale = tensors[f"{module}.weight_global_scale"].reciprocal()
    return nvfp4.dequantize(packed, block_scales, scale, torch.float32)


def quantized(
    model: torch.nn.Module, convention: str, linears: tuple[str, str, str]
) -> tuple[torch.nn.Module, Tensors]:
    """The model with quantized experts, and the checkpoint of them; scales are not what this project chooses."""
    model, tensors = copy.deepcopy(model), {}
    gate, up, down = linears
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            name = f"model.layers.{layer}.mlp"
            experts = block.mlp.experts
            for e, (gate_up, out) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
                half = len(gate_up) // 2
                scale = gate_up.abs().max() / 2000
                for part, rows in ((gate, slice(0, half)), (up, slice(half, None))):
                    gate_up[rows] = publish(tensors, f"{name}.experts.{e}.{part}", gate_up[rows], scale, convention)
                out.copy_(publish(tensors, f"{name}.experts.{e}.{down}", out, out.abs().max() / 1500, convention))
            if hasattr(block.mlp, "shared_expert"):
                shared = block.mlp.shared_expert
                scale = max(shared.gate_proj.weight.abs().max(), shared.up_proj.weight.abs().max()) / 2000
                for part in ("gate_proj", "up_proj", "down_proj"):
                    weight = getattr(shared, part).weight
                    weight.copy_(publish(tensors, f"{name}.shared_expert.{part}", weight, scale, convention))
    return model, tensors


@pytest.fixture(scope="module", params=["qwen2_moe", "mixtral"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, torch.nn.Module, Callable[[int], torch.Tensor], SourceModel]:
    path = tmp_path_factory.mktemp("packed") / "model.onnx"
    model, draw = moe_zoo.build(request.param)
    moe_zoo.export(model, draw(0), path, "torchscript")
    return request.param, model, draw, load(path)


def linears_of(name: str) -> tuple[str, str, str]:
    """What the checkpoints of a model call an expert's linears."""
    return ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")


Exported = tuple[str, torch.nn.Module, Callable[[int], torch.Tensor], SourceModel]


@pytest.mark.parametrize("convention", [MODELOPT, COMPRESSED])
def test_experts_of_a_checkpoint(exported: Exported, convention: str, tmp_path: Path, seed: int) -> None:
    name, model, draw, source = exported
    names = linears_of(name)
    reference, tensors = quantized(model, convention, names)
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_all(source, kinds=("moe",))
    for entry in plan.subgraphs:
        entry.decision = "nvfp4_w4a16" if entry.kind == "moe" else "keep"
    result = rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=NVFP4Checkpoint(tmp_path))
    x = draw(seed)
    with torch.no_grad():
        expected = reference(x).numpy()
    (y,) = run(result.path, x.numpy())
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_bytes_and_input_scales(exported: Exported, tmp_path: Path) -> None:
    """Gate and up rows interleaved, nothing requantized; 4-bit activations are scaled as the checkpoint says."""
    name, model, _, source = exported
    names = linears_of(name)
    _, tensors = quantized(model, MODELOPT, names)
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_all(source, kinds=("moe",))
    for entry in plan.subgraphs:
        entry.decision = "nvfp4_w4a4" if entry.kind == "moe" else "keep"
    written = onnx.load(rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=NVFP4Checkpoint(tmp_path)).path)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    node = next(node for node in written.graph.node if node.domain)
    inputs = dict(zip([formal.name for formal in OPS["NVFP4MoE"].inputs], node.input, strict=True))
    gate, up = (tensors[f"model.layers.0.mlp.experts.1.{part}.weight"].view(torch.int8).numpy() for part in names[:2])
    np.testing.assert_array_equal(arrays[inputs["gate_up_weight"]][1][0::2], gate)
    np.testing.assert_array_equal(arrays[inputs["gate_up_weight"]][1][1::2], up)
    for key, parts in (("input", names[:2]), ("hidden", names[2:])):
        scales = [
            scale
            for module, scale in tensors.items()
            if ".layers.0.mlp.experts." in module and module.endswith(tuple(f"{part}.input_scale" for part in parts))
        ]
        # It becomes a largest magnitude in between, as statistics have it.
        assert arrays[inputs[f"{key}_tensor_scale"]] == pytest.approx(max(scales).item(), rel=2e-7)


def test_numbers_of_experts(exported: Exported, tmp_path: Path, seed: int) -> None:
    """What multiplies an expert's down projection multiplies the tensor scale of its published bytes."""
    name, model, _, source = exported
    _, tensors = quantized(model, MODELOPT, linears_of(name))
    save_file(tensors, tmp_path / "model.safetensors")
    subgraph = next(subgraph for subgraph in find_subgraphs(source) if isinstance(subgraph, MoeSubgraph))
    packed = PackedExperts.find(NVFP4Checkpoint(tmp_path), subgraph)
    assert packed is not None
    assert subgraph.moe is not None
    experts = subgraph.moe.experts
    numbers = np.random.default_rng(seed).uniform(0.5, 2, len(experts)).tolist()
    scaled = [
        replace(mlp, down=replace(mlp.down, weight=replace(mlp.down.weight, scale=number)))
        for mlp, number in zip(experts, numbers, strict=True)
    ]
    for down, factors in ((False, [1.0] * len(experts)), (True, numbers)):
        before, after = (
            np.array([float(group[0].tensor_scales()[0]) for group in packed.routed(mlps, down)])
            for mlps in (experts, scaled)
        )
        np.testing.assert_allclose(after, before * factors, rtol=1e-6)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda t: [t.pop(key) for key in list(t) if ".layers.1.mlp.experts.2.w3" in key],
            r"no NVFP4 weight '.*2\.w3'",
        ),
        (lambda t: t.update({"model.layers.0.mlp.experts.0.w3.weight_scale_2": torch.tensor(9.0)}), "one tensor scale"),
        (
            lambda t: t.update(
                {
                    "model.layers.0.mlp.experts.3.w2.weight": torch.zeros(64, 32, dtype=torch.uint8),
                    "model.layers.0.mlp.experts.3.w2.weight_scale": torch.ones(64, 4).to(torch.float8_e4m3fn),
                }
            ),
            r"experts.3.w2 is \(64, 64\) in the checkpoint and \(64, 48\) in the model",
        ),
        (
            lambda t: t.update(
                {
                    k.replace("1.mlp.experts.0", "1.mlp.experts.11"): v.clone()
                    for k, v in t.items()
                    if "1.mlp.experts.0" in k
                }
            ),
            r"'model.layers.1.mlp' has 12 NVFP4 experts in the checkpoint and 4 in the model; .* leave --set packed",
        ),
        (
            lambda t: [t.pop(key) for key in list(t) if ".layers.0.mlp.experts.3." in key],
            r"'model.layers.0.mlp' has 3 NVFP4 experts in the checkpoint and 4 in the model",
        ),
    ],
    ids=["missing", "two scales", "shape", "more experts", "fewer experts"],
)
def test_checkpoints_that_do_not_fit(damage: Callable[[Tensors], object], text: str, tmp_path: Path) -> None:
    model, draw = moe_zoo.build("mixtral")
    moe_zoo.export(model, draw(0), tmp_path / "model.onnx", "torchscript")
    _, tensors = quantized(model, MODELOPT, ("w1", "w3", "w2"))
    damage(tensors)
    (tmp_path / "weights").mkdir()
    save_file(tensors, tmp_path / "weights" / "model.safetensors")
    source = load(tmp_path / "model.onnx")
    plan = plan_all(source, kinds=("moe",))
    with pytest.raises(CalibrationError, match=text):
        rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=NVFP4Checkpoint(tmp_path / "weights"))
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(("ratio", "folds"), [(1.0, True), (2.0, True), (0.25, True), (1.25, False)])
def test_one_tensor_scale_for_gate_and_up(ratio: float, folds: bool, tmp_path: Path, seed: int) -> None:
    """Another's block scales change where that gives the very same values."""
    weights = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(seed))
    tensors: Tensors = {}
    for name, weight, scale in zip(("gate", "up"), weights, (2.0**-9, ratio * 2.0**-9), strict=True):
        packed, block_scales, _ = nvfp4.quantize(weight, scale)
        tensors |= {f"{name}.weight": packed, f"{name}.weight_scale": block_scales}
        tensors |= {f"{name}.weight_scale_2": torch.tensor(scale)}
    save_file(tensors, tmp_path / "model.safetensors")
    weight = cast(Weight, SimpleNamespace(shape=(32, 64), scale=1.0))
    group = [NVFP4Source(NVFP4Checkpoint(tmp_path), name, weight) for name in ("gate", "up")]
    scale = common_scale(group)
    assert (scale is not None) == folds
    if scale is not None:
        for source in group:
            found, own = source.block_scales_under(scale), source.read()
            assert found is not None
            values = (
                nvfp4.dequantize(own.packed, *by) for by in ((found, scale), (own.block_scales, own.tensor_scale))
            )
            assert torch.equal(*values)
