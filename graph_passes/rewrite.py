"""Carries out a plan: the model with plugin nodes and quantized weights, written beside its external data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import Recipe, parse
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.ir.save import Progress, write
from trt_nvfp4.graph_passes.ir.tensors import weights_bytes
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.attention import cache_scales, join_projections, lower_attention
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import lower_fp8_moe
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import lower_fp8_mlp
from trt_nvfp4.graph_passes.lowerings.fp8_qdq import Quantized, lower_fp8
from trt_nvfp4.graph_passes.lowerings.half import Converted, lower_half
from trt_nvfp4.graph_passes.lowerings.nvfp4_moe_plugin import lower_nvfp4_moe
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import lower_nvfp4
from trt_nvfp4.graph_passes.lowerings.trt_moe import function as native_function
from trt_nvfp4.graph_passes.lowerings.trt_moe import lower_native_moe
from trt_nvfp4.graph_passes.lowerings.trt_nvfp4 import OLDEST_IR_VERSION, lower_native_nvfp4
from trt_nvfp4.graph_passes.lowerings.trt_nvfp4 import functions as native_nvfp4_functions
from trt_nvfp4.graph_passes.planning.attention import FP8_CACHE, PLUGIN
from trt_nvfp4.graph_passes.planning.plan import NVFP4, Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.rebind import rebind
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import ConvertedTensor, MadeWeights
from trt_nvfp4.graph_passes.weights.awq_folding import Folding, find_foldings, fold
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_ranges
from trt_nvfp4.graph_passes.weights.published_fp8 import published_ranges
from trt_nvfp4.graph_passes.weights.quantization import Quantization, weight_readers
from trt_nvfp4.plugins.ops import OPS

# Decisions that can use the largest magnitude of activations.
_CALIBRATED = ("nvfp4_w4a4", "native_nvfp4", "fp8")
# What a rewritten model's metadata says about the plan that it follows; by subgraph, its decisions and what became of
# them.
METADATA = "trt_nvfp4.plan"


@dataclass(frozen=True)
class Lowered:
    """A plan carried out in memory: per subgraph the names of the nodes that compute it, for every initializer that was
    made the entry that it belongs to, and the tensors whose channels `awq` scaled, on which weights depend. Quantized
    weights are computed when they are written."""

    ir_model: ir.Model
    realized: dict[str, list[str]]
    made: dict[str, PlannedSubgraph]
    scaled: tuple[str, ...]


@dataclass(frozen=True)
class RewriteResult:
    """What was written: weight bytes before and after, and per subgraph the names of the nodes that compute it."""

    path: Path
    weights_bytes_before: int
    weights_bytes_after: int
    realized: dict[str, list[str]]


def calibration_tensors(plan: Plan) -> dict[str, frozenset[str]]:
    """The model's tensors whose statistics the plan can use, and of which kinds (see `statistics.collect`)."""
    wanted: dict[str, frozenset[str]] = {}
    for entry in plan.subgraphs:
        kinds = _recipe(plan, entry.decision).needs if entry.decision in NVFP4 else frozenset()
        if entry.decision == FP8_CACHE:
            kinds = frozenset({"head_amax"})
        if kinds or entry.decision in _CALIBRATED:
            for name in entry.linear_inputs:
                wanted[name] = wanted.get(name, frozenset()) | kinds
    return wanted


def check_statistics(plan: Plan, statistics: Statistics | None) -> None:
    """Raises CalibrationError where the plan's recipe or a decision needs statistics that are not there."""
    for entry in plan.subgraphs:
        for tensor in entry.linear_inputs if entry.decision == "native_nvfp4" else ():
            if statistics is None or not statistics.amax.get(tensor):
                known = "none" if statistics is None or tensor not in statistics.amax else "only zeros"
                raise CalibrationError(
                    f"TensorRT's own NVFP4 scales activations by statistics, and there are {known} of tensor "
                    f"'{tensor}' (subgraph '{entry.name}'): give input samples that reach it with --calib-data"
                )
    wanted = calibration_tensors(plan)
    if statistics is not None and (absent := [tensor for tensor in wanted if tensor not in statistics.amax]):
        held = len(wanted) - len(absent)
        raise CalibrationError(
            f"the statistics hold {held} of the {len(wanted)} tensors that the plan asks for, and not '{absent[0]}', "
            "so they are another model's or of other subgraphs: give input samples with --calib-data, or the "
            "statistics of these"
        )
    for tensor, kinds in wanted.items():
        found = None if statistics is None else statistics.of(tensor)
        missing = sorted(kind for kind in kinds if found is None or getattr(found, kind) is None)
        if missing:
            where = (
                "there are no statistics" if statistics is None else f"the statistics lack those of tensor '{tensor}'"
            )
            if "head_amax" in kinds:
                raise CalibrationError(
                    f"FP8 caches need the largest magnitudes of tensor '{tensor}' by head, and {where}: give input "
                    f"samples with --calib-data, or plan {PLUGIN}"
                )
            raise CalibrationError(
                f"recipe '{plan.recipe}' needs {', '.join(missing)} of the activations, and {where}: give input "
                "samples with --calib-data, or choose a recipe that needs none, such as mse"
            )


def _recipe(plan: Plan, decision: str) -> Recipe:
    recipe = parse(plan.recipe)
    return recipe.for_16_bit_activations() if decision == "nvfp4_w4a16" else recipe


def rewrite(
    model: SourceModel,
    plan: Plan,
    statistics: Statistics | None,
    out_path: str | Path,
    progress: Progress | None = None,
    checkpoint: NVFP4Checkpoint | None = None,
    found: Sequence[Subgraph] | None = None,
) -> RewriteResult:
    """Writes the planned model to `out_path` and its weights to `<out_path>.data`; both appear when both are complete.

    `progress` is called with (bytes written, bytes in all, tensor name). For the rest see `lower`.

    Raises:
        PlanError, CalibrationError, ModelError: as `lower`.
        OSError: the destination cannot be written.
    """
    lowered = lower(model, plan, statistics, checkpoint, found)
    path = Path(out_path)
    write(lowered.ir_model, path, progress)
    before, after = original_weights_bytes(model.graph), weights_bytes(lowered.ir_model.graph)
    return RewriteResult(path, before, after, lowered.realized)


def lower(
    model: SourceModel,
    plan: Plan,
    statistics: Statistics | None,
    checkpoint: NVFP4Checkpoint | None = None,
    found: Sequence[Subgraph] | None = None,
) -> Lowered:
    """Carries out the plan on a copy of `model`. Weights that `checkpoint` has in NVFP4 are taken over as they are.
    `found`: the model's subgraphs, None: find them.

    Raises:
        PlanError: the plan does not fit the model.
        CalibrationError: its recipe needs statistics that are not there; the checkpoint does not fit the model.
        ModelError: a weight holds NaN or Inf.
    """
    check_statistics(plan, statistics)
    checked = plan.check(model, found=found)
    target = replace(model, ir_model=model.ir_model.clone())
    parts = rebind([part for _, part in checked], model.graph, target.graph)
    planned = list(zip((entry for entry, _ in checked), parts, strict=True))
    foldings: list[Folding] = []
    if statistics is not None and parse(plan.recipe).awq:
        foldings, _ = find_foldings([part for entry, part in planned if entry.decision in NVFP4])
        statistics = fold(foldings, parse(plan.recipe), statistics)
    amax = {} if statistics is None else _known(statistics.amax)
    amax = _known(published_ranges(part for _, part in planned)) | amax
    if checkpoint is not None:
        amax = _known(packed_ranges(checkpoint, (part for _, part in planned))) | amax
    realized: dict[str, list[str]] = {}
    fp8_operands: Quantized = {}
    nvfp4_inputs: dict[ir.Value, ir.Value] = {}
    converted: Converted = {}
    made_weights: MadeWeights = {}
    readers = weight_readers(target.graph)
    position = {node: index for index, node in enumerate(target.graph)}
    # One for each initializer; those that are made follow the model's own.
    owners: list[PlannedSubgraph | None] = [None] * len(target.graph.initializers)
    # From the last to the first, so that no subgraph is replaced before those that read its output.
    for entry, subgraph in reversed(planned):
        recipe = _recipe(plan, entry.decision)
        if entry.decision.startswith("nvfp4"):
            lowering = lower_nvfp4_moe if subgraph.kind == "moe" else lower_nvfp4
            quantization = Quantization(recipe, statistics, checkpoint, readers, made_weights)
            w4a4 = entry.decision == "nvfp4_w4a4"
            realized[entry.name] = lowering(target.graph, subgraph, w4a4, amax, quantization)
        elif entry.decision == "native_nvfp4":
            quantization = Quantization(recipe, statistics, None, readers, made_weights)
            realized[entry.name] = lower_native_nvfp4(target.graph, subgraph, amax, quantization, nvfp4_inputs)
            target.ir_model.ir_version = max(target.ir_model.ir_version, OLDEST_IR_VERSION)
        elif entry.decision in (PLUGIN, FP8_CACHE):
            scales = None if entry.decision == PLUGIN or statistics is None else cache_scales(statistics, subgraph)
            realized[entry.name] = lower_attention(target.graph, subgraph, scales, made_weights)
        elif entry.decision == "native":
            realized[entry.name] = lower_native_moe(target.graph, subgraph, made_weights)
        elif entry.fp8_plugin:
            lowering_fp8 = lower_fp8_moe if subgraph.kind == "moe" else lower_fp8_mlp
            realized[entry.name] = lowering_fp8(target.graph, subgraph, amax, made_weights)
        elif entry.decision == "fp8":
            realized[entry.name] = lower_fp8(target.graph, subgraph, amax, fp8_operands)
        elif entry.decision in ("bf16", "fp16"):
            realized[entry.name] = lower_half(target.graph, subgraph, entry.decision, position, converted)
        else:
            realized[entry.name] = []
        owners += [entry] * (len(target.graph.initializers) - len(owners))
    made = {name: entry for name, entry in zip(target.graph.initializers, owners, strict=True) if entry is not None}
    fp8 = set(fp8_operands.values())
    join_projections(target.graph)
    passes.RemoveUnusedNodesPass()(target.ir_model)
    passes.NameFixPass()(target.ir_model)
    for proto in _functions(planned, target.opset):
        function = ir.serde.deserialize_function(proto)
        target.ir_model.functions[function.identifier()] = function
        target.ir_model.opset_imports[function.domain] = 1
    target.ir_model.metadata_props[METADATA] = json.dumps(
        {
            "target": plan.target,
            "precision": plan.precision,
            "recipe": plan.recipe,
            "calibrated": bool(amax),
            "activations": plan.activations.type,
            "decisions": {entry.name: entry.decision for entry in plan.subgraphs},
            "realized": realized,
            # So that what takes FP8 activations out of the model later is found.
            "quantized": [
                node.name for node in target.graph if node.op_type in ("MatMul", "Gemm") and node.inputs[0] in fp8
            ],
        }
    )
    return Lowered(target.ir_model, realized, made, tuple(folding.tensor for folding in foldings))


def _known(amax: Mapping[str, float]) -> dict[str, float]:
    """Of what was 0 in all samples, or too small to make a scale of, nothing is known: that scale would turn real
    values to 0."""
    return {name: most for name, most in amax.items() if most > torch.finfo(torch.float32).tiny}


def _functions(planned: Sequence[tuple[PlannedSubgraph, Subgraph]], opset: int) -> list[onnx.FunctionProto]:
    """What the operators that a plan puts in compute, each once, by name."""
    decisions = {entry.decision for entry, _ in planned}
    ops = {subgraph.op for entry, subgraph in planned if entry.decision.startswith("nvfp4")}
    ops |= {entry.op for entry, _ in planned if entry.decision in (PLUGIN, FP8_CACHE)}
    ops |= {entry.fp8_plugin for entry, _ in planned if entry.fp8_plugin}
    functions = [OPS[op].function(opset) for op in ops]
    if "native" in decisions:
        functions.append(native_function(opset))
    if "native_nvfp4" in decisions:
        functions += native_nvfp4_functions()
    return sorted(functions, key=lambda function: function.name)


def original_weights_bytes(graph: ir.Graph) -> int:
    """Bytes of all initializers and Constants before some were converted to 16 bits."""
    converted = [v.const_value for v in graph.initializers.values() if isinstance(v.const_value, ConvertedTensor)]
    return weights_bytes(graph) + sum(tensor.original.nbytes - tensor.nbytes for tensor in converted)
