"""What to replace, and how: the plan that was given or a new one, written beside the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trt_nvfp4.builder import roofline
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, VERIFICATION_FAILED, BuilderError
from trt_nvfp4.builder.export.decoder_contract import decoder_of
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.profile_times import DECODE, PREFILL, note_profiles
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.token_bytes import token_bytes
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import DEFAULT, parse
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.coverage import unplanned_products
from trt_nvfp4.graph_passes.planning.decide import make_plan, selection
from trt_nvfp4.graph_passes.planning.decoder import KIND as DECODER
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.plan import BY_HAND, Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.rewrite import original_weights_bytes
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph


def given_plan(request: Request) -> Plan | None:
    """The plan that the user hands in, for this target."""
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    if request.recipe is not None:
        plan.recipe = str(parse(request.recipe))
    check_plan_target(request, plan)
    return plan


def check_plan_target(request: Request, plan: Plan) -> None:
    if plan.target != request.target.name:
        raise BuilderError(
            USAGE,
            f"{request.plan} is a plan for {plan.target}, not for {request.target.name}; plan again or change --target",
        )


def new_plan(
    request: Request,
    model: SourceModel,
    subgraphs: Sequence[Subgraph],
    calibrated: bool | Collection[str],
    tokens: Mapping[str, int],
    checkpoint: NVFP4Checkpoint | None,
) -> Plan:
    """`checkpoint`: holds weights in NVFP4, which it chose for whatever number of tokens."""
    try:
        plan = make_plan(
            model,
            subgraphs,
            request.target.capabilities,
            precision=request.precision,
            kinds=kinds_of(request),
            include=request.include,
            exclude=request.exclude,
            calibrated=calibrated,
            recipe=request.recipe or DEFAULT,
            moe=request.moe,
            attention=request.attention,
            kv_cache=request.kv_cache,
            tokens=tokens if _tokens_decide(request) and checkpoint is None else None,
            checkpoint=checkpoint,
        )
    except ModelError:
        raise
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error
    if request.is_part:
        return plan
    if any(entry.kind in (ATTENTION, BY_HAND) and entry.decision != "keep" for entry in plan.subgraphs):
        return plan
    check_found(request, model, {entry.kind for entry in plan.subgraphs})
    if not selected_entries(request, plan):
        name = next(entry.name for entry in plan.subgraphs if entry.kind in kinds_of(request))
        raise BuilderError(
            USAGE,
            f"{model.path}: --include and --exclude leave no subgraph to replace; they are matched against names such "
            f"as '{name}'",
        )
    return plan


def check_found(request: Request, model: SourceModel, found: Collection[str]) -> None:
    """Raises BuilderError (model) where none of the kinds of subgraphs that were `found` is one that was asked for."""
    kinds = sorted(set(found) - {ATTENTION, DECODER})
    if not (set(found) - {ATTENTION}) & set(kinds_of(request)):
        hint = f"; it has some of kind {', '.join(kinds)}: add --kinds {','.join(kinds)}" if kinds else ""
        convolutions = sum(node.op_type in ("Conv", "ConvTranspose") for node in model.graph)
        if convolutions:
            hint += f"; its {convolutions} convolutions stay as they are: no Conv is replaced"
        raise BuilderError(
            MODEL_AT_FAULT, f"{model.path}: found no subgraph of kind {' or '.join(kinds_of(request))}{hint}"
        )


def _tokens_decide(request: Request) -> bool:
    """Whether the plan weighs formats by tokens: nothing else was asked for."""
    return request.precision == "auto" and request.require != "nvfp4" and request.accuracy_budget is None


def take_plan(
    request: Request,
    model: SourceModel,
    plan: Plan,
    tokens: Mapping[str, int],
    calibrated: bool | Collection[str],
    report: Report,
    prefill: Mapping[str, int] | None = None,
) -> None:
    """Write the plan, and report it with predictions. `tokens` are the rows of each subgraph; of a decoder those of a
    decode step, and `prefill` those of a prompt."""
    # Before it is written beside what an earlier run built.
    check_required(request, plan)
    capabilities = request.target.capabilities
    kernels = note_kernels(plan.subgraphs, capabilities)
    report.warnings += slow_kernels(kernels)
    limits = roofline.LIMITS[request.target.name]
    predicted = roofline.predict(plan, tokens, limits, capabilities)
    of_prompt = None if prefill is None else roofline.predict(plan, prefill, limits, capabilities)
    if of_prompt is not None:
        note_profiles(plan, {PREFILL: of_prompt, DECODE: predicted})
    file = request.file(".plan.yaml")
    if not _holds(file, plan):
        plan.save(file)
    report.files["plan"] = str(file)
    report.take_plan(plan, calibrated)
    report.unplanned = {kind: asdict(found) for kind, found in unplanned_products(model, plan).items()}
    report.warnings += roofline.slow_decoding(predicted, capabilities)
    of = roofline.share(plan, tokens, predicted, original_weights_bytes(model.graph))
    report.predicted = {
        "gpu": limits.gpu,
        "bandwidth": limits.bandwidth,
        "tflops": dict(limits.tflops),
        "source": limits.source,
        "of": of,
        "subgraphs": predicted,
    }
    if of_prompt is not None:
        report.predicted[PREFILL] = of_prompt
    if (decoder := decoder_of(read(model.path))) is not None:
        report.token_bytes = token_bytes(model, plan, decoder, limits)


def _holds(file: Path, plan: Plan) -> bool:
    """Whether the plan was read from the file and has not changed since (--recipe): its user's comments stay then."""
    if plan.path is None or not file.exists() or not file.samefile(plan.path):
        return False
    return Plan.load(plan.path) == plan


def check_required(request: Request, plan: Plan) -> None:
    """Raise BuilderError (verification) when the plan falls short of `--require` in a subgraph that was selected."""
    require = request.require
    if require is None:
        return
    selected = selected_entries(request, plan)
    if request.require_fast:
        slow = list(slow_kernels(note_kernels(selected, request.target.capabilities)))
        if slow:
            raise BuilderError(VERIFICATION_FAILED, f"--require-fast cannot be met: {'; '.join(slow)}")
    short = [entry for entry in selected if not entry.lowering.meets(require) and not _apart(entry, plan, require)]
    if short or not (selected or request.is_part):
        listed = (
            "; ".join(f"{entry.name}: {entry.decision} ({entry.reason})" for entry in short) or "no subgraph at all"
        )
        raise BuilderError(VERIFICATION_FAILED, f"--require {require} cannot be met: {listed}")


def selected_entries(request: Request, plan: Plan) -> list[PlannedSubgraph]:
    why_not = selection(kinds_of(request), request.include, request.exclude)
    return [entry for entry in plan.subgraphs if why_not(entry) is None]


def kinds_of(request: Request) -> tuple[str, ...]:
    assert request.kinds is not None, "_of_task gives them"
    return request.kinds


def _apart(entry: PlannedSubgraph, plan: Plan, require: str) -> bool:
    """Whether the linears of an MLP that cannot be replaced as one, all of its weights, are planned well enough; or the
    parts of a decoder's layer."""
    if entry.kind == DECODER:
        parts = [part for part in plan.subgraphs if part is not entry and set(part.nodes) <= set(entry.nodes)]
        return bool(parts) and all(part.kind == ATTENTION or part.lowering.meets(require) for part in parts)
    if entry.kind not in ("mlp", "gated_mlp"):
        return False
    linears = [
        part
        for part in plan.subgraphs
        if part.kind == "linear" and part.lowering.meets(require) and set(part.nodes) <= set(entry.nodes)
    ]
    return sum(map(_weights, linears)) == _weights(entry)


def _weights(entry: PlannedSubgraph) -> int:
    return sum(gemm.n * gemm.k * gemm.count for gemm in roofline.gemms(entry.kind, entry.shapes))
