"""MLPs and linears from NVFP4 checkpoints: found by their modules, taken over bit by bit, with their ranges."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

from onnx_models import zoo
from onnx_models.graphs import Graph, assert_same, mlp_model, run, spec
from onnx_models.passes import found_mlps, plan_all
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, rewrite
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices, packed_ranges

MLPS = ("gated_mlp", "mlp")
# The linears of an MLP; those of one tuple have one tensor scale.
LINEARS = {
    "llama": (("gate_proj", "up_proj"), ("down_proj",)),
    "phi3": (("gate_up_proj",), ("down_proj",)),
    "gpt2": (("mlp.c_fc",), ("mlp.c_proj",)),
    "bert": (("intermediate.dense",), ("output.dense",)),
}


def publish(model: torch.nn.Module, name: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """A checkpoint of the model's MLPs, whose weights become the checkpoint's values."""
    tensors: dict[str, torch.Tensor] = {}
    modules = {path: module for path, module in model.named_modules() if not path.endswith("attention.output.dense")}
    for linears in LINEARS[name]:
        firsts = [path.removesuffix(linears[0]) for path in modules if path.endswith(f".{linears[0]}")]
        for parent in firsts:
            weights = [modules[parent + linear].weight for linear in linears]
            scale = max(weight.detach().abs().max() for weight in weights) / 2000
            for linear, weight in zip(linears, weights, strict=True):
                transposed = name == "gpt2"  # its Conv1D holds [in, out]
                values = weight.data.T if transposed else weight.data
                packed, block_scales, _ = nvfp4.quantize(values.contiguous(), scale)
                rounded = nvfp4.dequantize(packed, block_scales, scale)
                weight.data = rounded.T.contiguous() if transposed else rounded
                module = prefix + parent + linear
                tensors |= {f"{module}.weight": packed, f"{module}.weight_scale": block_scales}
                tensors |= {f"{module}.weight_scale_2": scale.clone()}
                tensors[f"{module}.input_scale"] = torch.tensor(0.002 + 0.0005 * len(tensors))
    return tensors


def decided(source: SourceModel, decision: str) -> Plan:
    plan = plan_all(source, kinds=MLPS)
    for entry in plan.subgraphs:
        entry.decision = decision if entry.kind in MLPS else "keep"
    return plan


@pytest.fixture(scope="module", params=[(n, e) for n in LINEARS for e in ("torchscript", "dynamo")], ids="-".join)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, torch.nn.Module, Callable[[int], torch.Tensor], SourceModel]:
    name, exporter = request.param
    path = tmp_path_factory.mktemp("packed") / "model.onnx"
    model, draw = zoo.build(name)
    zoo.export(model, draw(0), path, exporter)
    return name, model, draw, load(path)


Exported = tuple[str, torch.nn.Module, Callable[[int], torch.Tensor], SourceModel]


def test_weights_of_a_checkpoint(exported: Exported, tmp_path: Path, seed: int) -> None:
    """Of fused projections, of weights stored transposed, and by either exporter's names."""
    name, model, draw, source = exported
    reference = copy.deepcopy(model)
    save_file(publish(reference, name), tmp_path / "model.safetensors")
    checkpoint = NVFP4Checkpoint(tmp_path)
    assert all(all(held_matrices(checkpoint, part)) for part in found_mlps(source))
    plan = decided(source, "nvfp4_w4a16")
    x = draw(seed)
    (y,) = run(rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=checkpoint).path, x.numpy())
    with torch.no_grad():
        expected = reference(x).numpy()
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-5 * np.abs(expected).max())
    (own,) = run(rewrite(source, plan, None, tmp_path / "own.onnx").path, x.numpy())
    assert np.abs(own - expected).max() > 5e-4 * np.abs(expected).max()


@pytest.fixture
def llama(tmp_path: Path) -> tuple[torch.nn.Module, SourceModel]:
    model, draw = zoo.build("llama")
    zoo.export(model, draw(0), tmp_path / "model.onnx", "torchscript")
    return model, load(tmp_path / "model.onnx")


Llama = tuple[torch.nn.Module, SourceModel]
Load = Callable[[onnx.ModelProto], SourceModel]


def saved(tensors: dict[str, torch.Tensor], tmp_path: Path) -> NVFP4Checkpoint:
    save_file(tensors, tmp_path / "weights.safetensors")
    return NVFP4Checkpoint(tmp_path / "weights.safetensors")


def test_bytes_and_ranges(llama: Llama, tmp_path: Path) -> None:
    """Gate and up rows interleaved; activations are scaled as the checkpoint says, without statistics."""
    model, source = llama
    tensors = publish(copy.deepcopy(model), "llama")
    checkpoint = saved(tensors, tmp_path)
    ranges = packed_ranges(checkpoint, find_subgraphs(source))
    plan = plan_all(source, kinds=MLPS, calibrated=ranges.keys())
    assert [e.decision for e in plan.subgraphs if e.kind == "gated_mlp"] == ["nvfp4_w4a4"] * zoo.LAYERS
    written = onnx.load(rewrite(source, plan, None, tmp_path / "out.onnx", checkpoint=checkpoint).path)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    nodes = [node for node in written.graph.node if node.op_type == "NVFP4GatedMLP"]
    assert len(nodes) == zoo.LAYERS
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 50.0), 1)  # of the user's samples: they go first
    sampled = onnx.load(rewrite(source, plan, statistics, tmp_path / "sampled.onnx", checkpoint=checkpoint).path)
    scales_of_x = [t for t in sampled.graph.initializer if t.name.endswith("input_tensor_scale")]
    assert [float(numpy_helper.to_array(t)) for t in scales_of_x] == pytest.approx([50 / 2688] * zoo.LAYERS)
    for layer, node in enumerate(nodes):
        mlp = f"model.layers.{layer}.mlp"
        gate_up, down = (arrays[name] for name in node.input if name.endswith(("gate_up_weight", "down_weight")))
        np.testing.assert_array_equal(gate_up[0::2], tensors[f"{mlp}.gate_proj.weight"].view(torch.int8))
        np.testing.assert_array_equal(gate_up[1::2], tensors[f"{mlp}.up_proj.weight"].view(torch.int8))
        np.testing.assert_array_equal(down, tensors[f"{mlp}.down_proj.weight"].view(torch.int8))
        scales = {name.rpartition("/")[2]: float(arrays[name]) for name in node.input if "put_tensor" in name}
        both = [tensors[f"{mlp}.{part}.input_scale"].item() for part in ("gate_proj", "up_proj")]
        assert scales["input_tensor_scale"] == pytest.approx(max(both), rel=2e-7)
        (static,) = [a.i for a in node.attribute if a.name == "static_scales"]
        assert static == 1


def test_plans_say_that_weights_of_a_checkpoint_have_no_residual_channels(llama: Llama, tmp_path: Path) -> None:
    model, source = llama
    checkpoint = saved(publish(copy.deepcopy(model), "llama"), tmp_path)
    for given, why in ((None, None), (checkpoint, "its weights are taken from a checkpoint, whose blocks cannot be")):
        plan = plan_all(source, kinds=MLPS, calibrated=True, recipe="max+residual:32", checkpoint=given)
        reasons = [entry.reason for entry in plan.subgraphs if entry.kind in MLPS]
        assert all(f"no residual channels: {why}" in reason for reason in reasons) == (given is not None)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_names_with_more_in_front(prefix: str, llama: Llama, tmp_path: Path) -> None:
    """Libraries wrap a model's modules in others."""
    model, source = llama
    checkpoint = saved(publish(copy.deepcopy(model), "llama", prefix), tmp_path)
    assert all(all(held_matrices(checkpoint, part)) for part in found_mlps(source))


def published(graph: Graph) -> dict[str, torch.Tensor]:
    """The weights of a graph that stores them [in, out], under their own names."""
    tensors = {}
    for name, array in graph.weights.items():
        packed, block_scales, scale = nvfp4.quantize(torch.from_numpy(array.T.copy()), 1e-3)
        tensors |= {f"{name}.weight": packed, f"{name}.weight_scale": block_scales, f"{name}.weight_scale_2": scale}
    return tensors


@pytest.mark.parametrize("alpha", [0.5, -0.5])
def test_a_product_whose_sign_is_turned(alpha: float, loaded: Load, tmp_path: Path) -> None:
    """A tensor scale is positive: the weights are then quantized from the model's own."""
    model, graph = mlp_model(spec(linear="gemm_scaled", gated=False))
    for node in model.graph.node:
        for attribute in node.attribute:
            attribute.f = alpha if attribute.name == "alpha" else attribute.f
    (mlp,) = found_mlps(loaded(model))
    assert held_matrices(saved(published(graph), tmp_path), mlp) == [alpha > 0] * 2


def test_a_scale_of_activations_that_gate_alone_has(loaded: Load, tmp_path: Path) -> None:
    """Nothing says that it serves up as well."""
    model, graph = mlp_model(spec())
    scales = {f"{name}.input_scale": torch.tensor(0.25) for name in ("gate", "down")}
    ranges = packed_ranges(saved(published(graph) | scales, tmp_path), found_mlps(loaded(model)))
    assert ranges == {"h": pytest.approx(0.25 * 6 * 448)}


@pytest.mark.parametrize("gated", [False, True])
def test_zeros_fill_weights_of_a_checkpoint(gated: bool, loaded: Load, tmp_path: Path, seed: int) -> None:
    """Intermediate features that are no multiple of 32, as SigLIP's 4304: the published bytes, and zeros beside them,
    so that the kernels that the plan names serve them."""
    model, graph = mlp_model(spec(gated=gated, biases=True, intermediate=1008, seed=seed))
    tensors, source = published(graph), loaded(model)
    checkpoint = saved(tensors, tmp_path)
    result = rewrite(source, decided(source, "nvfp4_w4a16"), None, tmp_path / "o.onnx", checkpoint=checkpoint)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(result.path).graph.initializer}
    parts, rows = 1 + gated, 1008 * (1 + gated)
    shapes = {"up_weight": (-1, 16), "down_weight": (-1, 512)}
    first, down = (
        array.view(np.uint8).reshape(shape)
        for end, shape in shapes.items()
        for name, array in arrays.items()
        if name.endswith(end)
    )
    np.testing.assert_array_equal(first[parts - 1 : rows : parts], tensors["up.weight"])
    np.testing.assert_array_equal(down[:, :504], tensors["down.weight"])
    assert len(first) == 1024 * parts
    assert not first[rows:].any()
    assert not down[:, 504:].any()
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2:
            parts = (tensors[f"{tensor.name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
            tensor.CopyFrom(numpy_helper.from_array(nvfp4.dequantize(*parts).T.numpy(), tensor.name))
    onnx.save(model, tmp_path / "rounded.onnx")
    x = np.random.default_rng(seed).standard_normal((2, 3, 32)).astype(np.float32)
    assert_same(result.path, tmp_path / "rounded.onnx", x)


def test_what_stays_in_16_bits(llama: Llama, tmp_path: Path) -> None:
    """A layer that the checkpoint lacks is quantized as without it."""
    model, source = llama
    tensors = {k: v for k, v in publish(copy.deepcopy(model), "llama").items() if "layers.1." not in k}
    checkpoint = saved(tensors, tmp_path)
    assert [held_matrices(checkpoint, part) for part in found_mlps(source)] == [[True, True], [False, False]]
    plan = decided(source, "nvfp4_w4a16")
    paths = [
        rewrite(source, plan, None, tmp_path / f"{i}.onnx", checkpoint=c).path for i, c in ((0, checkpoint), (1, None))
    ]
    first, second = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if "_weight" in t.name}
        for path in paths
    )
    same = {name: np.array_equal(first[name], second[name]) for name in first if name.endswith("_weight.tensor_scale")}
    assert sorted(name for name, equal in same.items() if equal) == sorted(n for n in same if "layers.1" in n)
    assert len(same) == 2 * 2


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda t, m: t.update({f"{m}.1.mlp.up_proj.weight": t[f"{m}.0.mlp.up_proj.weight"].clone()}),
            r"layers\.1\.mlp\.up_proj of the checkpoint is not the model's .* first 8 rows differ by 1\d\d%",
        ),
        (lambda t, m: t.update({f"{m}.0.mlp.up_proj.weight_scale_2": torch.tensor(9.0)}), "one tensor scale"),
        (lambda t, m: t.update({f"{m}.0.mlp.up_proj.pre_quant_scale": torch.ones(64)}), "pre_quant_scale"),
        (
            lambda t, m: t.update(
                {
                    f"{m}.0.mlp.down_proj.weight": torch.zeros(64, 32, dtype=torch.uint8),
                    f"{m}.0.mlp.down_proj.weight_scale": torch.ones(64, 4).to(torch.float8_e4m3fn),
                }
            ),
            r"layers.0.mlp.down_proj is \(64, 64\) in the checkpoint and \(64, 96\) in the model",
        ),
    ],
    ids=["another layer's values", "two scales", "AWQ", "shape"],
)
def test_checkpoints_that_do_not_fit(
    damage: Callable[[dict[str, torch.Tensor], str], object], text: str, llama: Llama, tmp_path: Path
) -> None:
    model, source = llama
    tensors = publish(copy.deepcopy(model), "llama")
    damage(tensors, "model.layers")
    with pytest.raises(CalibrationError, match=text):
        rewrite(
            source, decided(source, "nvfp4_w4a16"), None, tmp_path / "out.onnx", checkpoint=saved(tensors, tmp_path)
        )
    assert not (tmp_path / "out.onnx").exists()
