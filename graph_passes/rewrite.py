"""Carries out a plan: the model with plugin nodes and quantized weights, written beside its external data."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.ir.passes import Observer, Pass, on_graph, run_passes
from trt_nvfp4.graph_passes.ir.save import Progress, write
from trt_nvfp4.graph_passes.ir.tensors import weights_bytes
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN, is_plugin
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.attention import join_projections
from trt_nvfp4.graph_passes.lowerings.check_types import check_types
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.lowerings.lowering import Fuse
from trt_nvfp4.graph_passes.lowerings.registry import BY_HAND
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.rebind import rebind
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import ConvertedTensor
from trt_nvfp4.graph_passes.weights.awq_folding import Folding, find_foldings, fold
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_ranges
from trt_nvfp4.graph_passes.weights.published_caches import with_published_scales
from trt_nvfp4.graph_passes.weights.published_fp8 import published_ranges
from trt_nvfp4.graph_passes.weights.quantization import weight_readers
from trt_nvfp4.graph_passes.weights.whole_amax import note_whole_amax
from trt_nvfp4.plugins.ops import OPS

_CLEANUP = (
    Pass("join-projections", on_graph(join_projections)),
    Pass("remove-unused-nodes", passes.RemoveUnusedNodesPass()),
    Pass("name-nodes", passes.NameFixPass()),
)


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
    """The written model: weight bytes before and after, and per subgraph the names of the nodes that compute it."""

    path: Path
    weights_bytes_before: int
    weights_bytes_after: int
    realized: dict[str, list[str]]


def calibration_tensors(plan: Plan, found: Iterable[Subgraph] = ()) -> dict[str, frozenset[str]]:
    """The model's tensors whose statistics the plan can use, and of which kinds (see `statistics.collect`); `found`:
    its subgraphs, caches of which may have scales that the checkpoint publishes."""
    published = with_published_scales(found)
    wanted: dict[str, frozenset[str]] = {}
    recipe = parse(plan.recipe)
    for entry in plan.subgraphs:
        kinds = entry.lowering.needs(entry.own(recipe))
        if kinds or entry.lowering.ranges:
            for name in entry.linear_inputs:
                if not kind_of(entry).caches_tokens or name not in published:
                    wanted[name] = wanted.get(name, frozenset()) | kinds
    return wanted


def check_statistics(plan: Plan, statistics: Statistics | None, subgraphs: Iterable[Subgraph] = ()) -> None:
    """Raises CalibrationError where the plan's recipe or a decision needs statistics that are not there; `subgraphs`
    are the model's, as for `calibration_tensors`."""
    for entry in plan.subgraphs:
        for tensor in entry.linear_inputs if entry.lowering.ranges == "required" else ():
            if statistics is None or not statistics.amax.get(tensor):
                known = "none" if statistics is None or tensor not in statistics.amax else "only zeros"
                raise CalibrationError(
                    f"TensorRT's own NVFP4 scales activations by statistics, and there are {known} of tensor "
                    f"'{tensor}' (subgraph '{entry.name}'): give input samples that reach it with --calib-data"
                )
    wanted = calibration_tensors(plan, subgraphs)
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
                    f"samples with --calib-data, or plan {Decision.ATTENTION}"
                )
            raise CalibrationError(
                f"recipe '{plan.recipe}' needs {', '.join(missing)} of the activations, and {where}: give input "
                "samples with --calib-data, or choose a recipe that needs none, such as mse"
            )


def rewrite(
    model: SourceModel,
    plan: Plan,
    statistics: Statistics | None,
    out_path: str | Path,
    progress: Progress | None = None,
    checkpoint: NVFP4Checkpoint | None = None,
    found: Sequence[Subgraph] | None = None,
    observer: Observer | None = None,
) -> RewriteResult:
    """Writes the planned model to `out_path` and its weights to `<out_path>.data`; both appear when both are complete.

    `progress` is called with (bytes written, bytes in all, tensor name). For the rest see `lower`.

    Raises:
        PlanError, CalibrationError, ModelError: as `lower`.
        OSError: the destination cannot be written.
    """
    lowered = lower(model, plan, statistics, checkpoint, found, observer)
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
    observer: Observer | None = None,
) -> Lowered:
    """Carries out the plan on a copy of `model`. Weights that `checkpoint` has in NVFP4 are taken over as they are.
    `found`: the model's subgraphs, None: find them. `observer` sees the graph after each pass.

    Raises:
        PlanError: the plan does not fit the model.
        CalibrationError: its recipe needs statistics that are not there; the checkpoint does not fit the model.
        ModelError: a weight holds NaN or Inf; an operator would get operands of different types.
    """
    checked = plan.check(model, found=found)
    check_statistics(plan, statistics, (part for _, part in checked))
    target = replace(model, ir_model=model.ir_model.clone())
    note_whole_amax(target.ir_model)
    parts = rebind([part for _, part in checked], model.graph, target.graph)
    planned = list(zip((entry for entry, _ in checked), parts, strict=True))
    foldings: list[Folding] = []
    if statistics is not None and parse(plan.recipe).awq:
        foldings, _ = find_foldings([part for entry, part in planned if entry.lowering.weights == "nvfp4"])
        statistics = fold(foldings, parse(plan.recipe), statistics)
    amax = {} if statistics is None else _known(statistics.amax)
    amax = _known(published_ranges(part for _, part in planned)) | amax
    if checkpoint is not None:
        amax = _known(packed_ranges(checkpoint, (part for _, part in planned))) | amax
    realized: dict[str, list[str]] = {}
    recipe = parse(plan.recipe)
    context = LoweringContext(
        target.ir_model,
        recipe,
        amax,
        statistics,
        checkpoint,
        weight_readers(target.graph),
        {node: index for index, node in enumerate(target.graph)},
    )
    # One for each initializer; those that are made follow the model's own.
    owners: list[PlannedSubgraph | None] = [None] * len(target.graph.initializers)
    # From the last to the first, so that no subgraph is replaced before those that read its output.
    for entry, subgraph in reversed(planned):
        lowering = entry.lowering
        realized[entry.name] = lowering.lower(replace(context, recipe=lowering.recipe(entry.own(recipe))), subgraph)
        owners += [entry] * (len(target.graph.initializers) - len(owners))
    made = {name: entry for name, entry in zip(target.graph.initializers, owners, strict=True) if entry is not None}
    fp8 = set(context.fp8_operands.values())
    fused: dict[Fuse, list[Subgraph]] = {}
    for entry, subgraph in planned:
        if (fuse := entry.lowering.forms[subgraph.kind].fuse) is not None:
            fused.setdefault(fuse, []).append(subgraph)
    for fuse, together in fused.items():
        fuse(target.graph, together, realized)
    if observer is not None:
        observer("lower-subgraphs", target.ir_model)
    run_passes(target.ir_model, _CLEANUP, observer)
    check_types(target.ir_model)
    for proto in _functions(planned, target.graph, target.opset):
        function = ir.serde.deserialize_function(proto)
        target.ir_model.functions[function.identifier()] = function
        target.ir_model.opset_imports[function.domain] = 1
    target.ir_model.metadata_props[REWRITTEN] = json.dumps(
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
    """`amax` without values that are 0 or too small to make a scale, which would turn real values to 0."""
    return {name: most for name, most in amax.items() if most > torch.finfo(torch.float32).tiny}


def _functions(
    planned: Sequence[tuple[PlannedSubgraph, Subgraph]], graph: ir.Graph, opset: int
) -> list[onnx.FunctionProto]:
    """Definitions of the operators that a plan puts in or the model brought, each once, by name; without those of parts
    that another operator took in."""
    made = {(entry.lowering.functions, entry.lowering.op(subgraph)) for entry, subgraph in planned}
    plugins = {node.op_type for node in graph if is_plugin(node)}
    made |= {(BY_HAND.functions, op) for op in plugins}
    functions = {function.name: function for make, op in made for function in make(op, opset)}
    return [functions[name] for name in sorted(functions) if name in plugins or name not in OPS]


def original_weights_bytes(graph: ir.Graph) -> int:
    """Bytes of all initializers and Constants before some were converted to 16 bits."""
    converted = [v.const_value for v in graph.initializers.values() if isinstance(v.const_value, ConvertedTensor)]
    return weights_bytes(graph) + sum(tensor.original.nbytes - tensor.nbytes for tensor in converted)
