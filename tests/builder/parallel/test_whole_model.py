"""Ranks take tensor scales and statistics from the whole model: they quantize as the model that was split does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from parallel_models import DENSE, MIXTURE, exported_ranks, saved

from onnx_models.passes import plan_all
from trt_nvfp4.builder.generate.caches import cache_shapes
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.simulate import prefix, save_simulated
from trt_nvfp4.builder.parallel.whole_model import calibrate_ranks
from trt_nvfp4.builder.terminal.progress import Silent
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.recipes.residual_channels import residual_order
from trt_nvfp4.calibration.samples.filled_caches import with_filled_caches
from trt_nvfp4.calibration.samples.samples import Sample
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel, load
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, rewrite
from trt_nvfp4.graph_passes.weights.whole_amax import KEY, note_whole_amax
from trt_nvfp4.plugins.ops.number_formats import untile_scales

pytest.importorskip("transformers")
WIDE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}


def text(model: Path, seed: int) -> Sample:
    """Eight tokens over empty caches."""
    decoder = decoder_of(onnx.load(model, load_external_data=False))
    assert decoder is not None
    caches = {name: np.zeros(shape, np.float32) for name, shape in cache_shapes(decoder, 1).items()}
    ids = np.random.default_rng(seed).integers(3, 101, (1, 8))
    return {"input_ids": ids, "past_length": np.zeros(1, np.int64), "new_length": np.full(1, 8), **caches}


@dataclass
class Split:
    """The whole model and its ranks, each with what a plan of W4A4 makes of it."""

    whole: onnx.ModelProto
    ranks: list[onnx.ModelProto]
    statistics: list[Statistics]  # of the whole, then of the ranks
    plans: list[Plan]
    logits: list[np.ndarray]  # of the whole, and of the ranks together


def split(folder: RankFolder, recipe: str, calibrated: bool) -> Split:
    files = [folder.folder / "whole.onnx", *(folder.model(rank) for rank in range(folder.count))]
    sources = [load(file) for file in files]
    plans = [_plan(source, recipe, calibrated) for source in sources]
    known: list[Statistics | None] = [None] * len(files)
    if calibrated:
        data = [text(files[0], seed) for seed in range(3)]
        whole = collect(files[0], calibration_tensors(plans[0]), with_filled_caches(data))
        data = [text(files[1], seed) for seed in range(3)]
        own = calibrate_ranks(files[1:], plans[1:], data, folder.folder, Silent())
        known = [whole, *(Statistics.load(file, path) for file, path in zip(own, files[1:], strict=True))]
    made = [file.with_suffix(".w4a4.onnx") for file in files]
    for source, plan, statistics, file in zip(sources, plans, known, made, strict=True):
        rewrite(source, plan, statistics, file)
    save_simulated(made[1:], folder.folder / "ranks.onnx")
    given, part = text(files[0], 9), text(files[1], 9)
    feeds = {prefix(rank) + name: array for rank in range(folder.count) for name, array in part.items()}
    logits = [
        session(made[0]).run(["logits"], given)[0],
        session(folder.folder / "ranks.onnx").run([prefix(0) + "logits"], feeds)[0],
    ]
    models = [onnx.load(file) for file in made]
    return Split(models[0], models[1:], [each for each in known if each is not None], plans, logits)


def _plan(source: SourceModel, recipe: str, calibrated: bool) -> Plan:
    plan = replace(plan_all(source, calibrated=calibrated), recipe=str(parse(recipe)))
    for entry in plan.subgraphs:
        if entry.decision.startswith("nvfp4"):
            entry.decision = type(entry.decision)("nvfp4_w4a4")
    return plan


def nodes(model: onnx.ModelProto, op: str) -> list[dict[str, np.ndarray]]:
    """Of every node of `op`: constants by the ends of their names."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return [
        {name.rpartition("/")[2]: arrays[name] for name in node.input if name in arrays}
        for node in model.graph.node
        if node.op_type == op
    ]


def row_scales(of: Mapping[str, np.ndarray], weight: str) -> np.ndarray:
    """Block scales, row by row."""
    values, tiled = of[weight], torch.from_numpy(of[f"{weight}.block_scales"])
    return untile_scales(tiled, len(values), values.shape[1] * 2 // 16).view(torch.uint8).numpy()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> RankFolder:
    made = tmp_path_factory.mktemp("dense")
    saved("Llama", {**DENSE, **WIDE}, made / "model")
    return exported_ranks(made / "model", made / "out", 2)


@pytest.mark.slow
def test_a_calibrated_model_that_is_split(dense: RankFolder) -> None:
    """Values, block scales and tensor scales of weights are those of the whole model, bit by bit; so are the scales of
    activations and the logits, but for the order of sums."""
    found = split(dense, "mse", calibrated=True)
    (whole,) = nodes(found.whole, "NVFP4GatedMLP")
    parts = [nodes(rank, "NVFP4GatedMLP")[0] for rank in found.ranks]
    for name in whole:
        if name.endswith("tensor_scale"):
            assert_scales(name, whole[name], [part[name] for part in parts])
    for weight, axis in (("gate_up_weight", 0), ("down_weight", 1)):
        np.testing.assert_array_equal(np.concatenate([part[weight] for part in parts], axis), whole[weight])
        joined = np.concatenate([row_scales(part, weight) for part in parts], axis)
        np.testing.assert_array_equal(joined, row_scales(whole, weight))
    for own, *ranks in zip(
        nodes(found.whole, "NVFP4Linear"), *(nodes(r, "NVFP4Linear") for r in found.ranks), strict=True
    ):
        for name in (name for name in own if name.endswith("tensor_scale")):
            assert_scales(name, own[name], [rank[name] for rank in ranks])
    expected, logits = found.logits
    assert np.linalg.norm(logits - expected) <= 2e-3 * np.linalg.norm(expected)


def assert_scales(name: str, whole: np.ndarray, ranks: list[np.ndarray]) -> None:
    assert (whole > 0).all()
    tolerance = 0 if "weight" in name else 1e-6
    for own in ranks:
        np.testing.assert_allclose(own, whole, rtol=tolerance, err_msg=name)


@pytest.mark.slow
def test_residual_channels(dense: RankFolder) -> None:
    """Of what all ranks read they are the whole model's; of what each has a part of, those are among a rank's own."""
    found = split(dense, "local-hessian+residual:32", calibrated=True)
    whole, *ranks = found.statistics
    (mlp,) = (entry for entry in found.plans[0].subgraphs if entry.kind == "gated_mlp")
    entries = [next(e for e in plan.subgraphs if e.kind == "gated_mlp") for plan in found.plans[1:]]
    read, hidden = mlp.linear_inputs
    order = [residual_order(whole.of(name)["mean_square"], 32)[-32:] for name in (read, hidden)]
    first = 0
    for statistics, entry in zip(ranks, entries, strict=True):
        own_read, own_hidden = entry.linear_inputs
        torch.testing.assert_close(
            residual_order(statistics.of(own_read)["mean_square"], 32)[-32:], order[0], rtol=0, atol=0
        )
        mean_square = statistics.of(own_hidden)["mean_square"]
        chosen = set((residual_order(mean_square, 32)[-32:] + first).tolist())
        assert {int(channel) for channel in order[1] if first <= channel < first + len(mean_square)} <= chosen
        first += len(mean_square)
    assert first == 256
    expected, logits = found.logits
    assert np.linalg.norm(logits - expected) <= 0.1 * np.linalg.norm(expected)


@pytest.mark.slow
def test_scales_at_run_time(dense: RankFolder) -> None:
    """A rank scales its part of a row by what it has of it: weights are the whole model's, activations nearly."""
    found = split(dense, "mse", calibrated=False)
    (whole,) = nodes(found.whole, "NVFP4GatedMLP")
    for rank in found.ranks:
        (part,) = nodes(rank, "NVFP4GatedMLP")
        assert part["hidden_tensor_scale"] == whole["hidden_tensor_scale"] == 0
        assert part["down_weight.tensor_scale"] == whole["down_weight.tensor_scale"]
    expected, logits = found.logits
    assert 0 < np.linalg.norm(logits - expected) <= 0.1 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "spread"), [(2, 1), (4, 2)])
def test_experts(count: int, spread: int, tmp_path: Path) -> None:
    """Each expert has the tensor scales that it has in the whole model, whichever rank has it, or a part of it."""
    config = {**MIXTURE, **WIDE, "moe_intermediate_size": 128}
    saved("Qwen3Moe", config, tmp_path / "model")
    folder = exported_ranks(tmp_path / "model", tmp_path / "out", count, spread)
    found = split(folder, "mse", calibrated=True)
    (whole,) = nodes(found.whole, "NVFP4MoE")
    for rank, model in enumerate(found.ranks):
        (part,) = nodes(model, "NVFP4MoE")
        experts = len(part["down_weight.tensor_scale"])
        first = rank * spread // count * experts
        for name in ("gate_up_weight.tensor_scale", "down_weight.tensor_scale"):
            np.testing.assert_array_equal(part[name], whole[name][first : first + experts])
        for name in ("input_tensor_scale", "hidden_tensor_scale"):
            assert_scales(name, whole[name], [part[name]])
    expected, logits = found.logits
    assert np.linalg.norm(logits - expected) <= 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("entry", ["{", "[]", '{"w": 3}', '{"w": [-1.0]}', '{"w": []}', '{"w": [NaN]}', '{"w": ["1"]}'])
def test_an_entry_that_is_none(entry: str) -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    model.metadata_props[KEY] = entry
    with pytest.raises(ModelError, match=f"metadata entry {KEY}"):
        note_whole_amax(model)
