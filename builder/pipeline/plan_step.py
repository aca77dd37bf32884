"""The plan of a build: the given one or a new one, written beside the output."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from trt_nvfp4.builder.errors import ModelFaultError, UsageError, VerificationError
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.builder.roofline import predict as roofline
from trt_nvfp4.builder.roofline.profile_times import DECODE, PREFILL, note_profiles
from trt_nvfp4.builder.roofline.token_bytes import token_bytes
from trt_nvfp4.calibration.recipes import DEFAULT, parse
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.planning.coverage import unplanned_products
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, KINDS, SELECTABLE_KINDS, kind_of, select
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph
from trt_nvfp4.graph_passes.rewrite import original_weights_bytes


def given_plan(request: Request) -> Plan | None:
    """The plan that the user hands in, with the recipe of the command line; `request_checks` has checked it."""
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    if request.recipe is not None:
        plan.recipe = str(parse(request.recipe))
    return plan


def new_plan(run: Run) -> Plan:
    """The plan for the subgraphs that were found. Raises BuilderError where the options leave nothing to replace."""
    request, model = run.request, run.network
    # Where no option decides otherwise. A checkpoint has chosen NVFP4 for any number of tokens.
    tokens_decide = request.precision == "auto" and request.require != "nvfp4" and request.accuracy_budget is None
    try:
        plan = make_plan(
            model,
            run.subgraphs,
            request.target.capabilities,
            PlanOptions(
                precision=request.precision,
                kinds=kinds_of(request),
                include=request.include,
                exclude=request.exclude,
                calibrated=run.calibrated,
                recipe=request.recipe or DEFAULT,
                moe=request.moe,
                attention=request.attention,
                kv_cache=request.kv_cache,
                tokens=run.tokens if tokens_decide and run.checkpoint is None else None,
                checkpoint=run.checkpoint,
                keeps_edges=request.is_denoiser and request.include is None,
            ),
        )
    except ModelError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    if request.is_part:
        return plan
    if any(kind_of(entry).selection == "always" and entry.decision != "keep" for entry in plan.subgraphs):
        return plan
    check_found(run, {entry.kind for entry in plan.subgraphs if kind_of(entry).selection != "always"})
    if not selected_entries(request, plan):
        name = next(entry.name for entry in plan.subgraphs if entry.kind in kinds_of(request))
        raise UsageError(
            f"{model.path}: --include and --exclude leave no subgraph to replace; they are matched against names such "
            f"as '{name}'"
        )
    return plan


def check_found(run: Run, found: Collection[str]) -> None:
    """Raises ModelFaultError where none of the kinds of subgraphs that were `found` is selected."""
    request, model = run.request, run.network
    kinds = sorted(set(found) & set(ALL_KINDS))
    if not set(found) & (set(KINDS) - set(SELECTABLE_KINDS) | set(kinds_of(request))):
        hint = f"; it has some of kind {', '.join(kinds)}: add --kinds {','.join(kinds)}" if kinds else ""
        convolutions = sum(node.op_type in ("Conv", "ConvTranspose") for node in model.graph)
        if convolutions:
            hint += f"; its {convolutions} convolutions stay as they are: no Conv is replaced"
        raise ModelFaultError(f"{model.path}: found no subgraph of kind {' or '.join(kinds_of(request))}{hint}")


def take_plan(run: Run) -> None:
    """Write the plan, and report it with predictions."""
    request, report, plan, model = run.request, run.report, run.plan, run.network
    # Before it is written beside what an earlier run built.
    check_required(request, plan)
    if request.plan is not None and not plan.subgraphs:
        report.warnings.append(
            f"{request.plan} lists no subgraphs, so that nothing is replaced: delete single entries to keep those, or "
            "write a fresh plan with --stop-after plan"
        )
    capabilities = request.target.capabilities
    kernels = note_kernels(plan.subgraphs, capabilities)
    report.warnings += slow_kernels(kernels)
    limits = roofline.LIMITS[request.target.name]
    predicted = roofline.predict(plan, run.tokens, limits, capabilities)
    of_prompt = None if run.prefill is None else roofline.predict(plan, run.prefill, limits, capabilities)
    if of_prompt is not None:
        note_profiles(plan, {PREFILL: of_prompt, DECODE: predicted})
    file = request.file(".plan.yaml")
    if not _holds(file, plan):
        plan.save(file)
    report.files["plan"] = str(file)
    report.take_plan(plan, run.calibrated)
    report.unplanned = {kind: asdict(found) for kind, found in unplanned_products(model, plan).items()}
    report.warnings += roofline.slow_decoding(predicted, capabilities)
    of = roofline.share(plan, run.tokens, predicted, original_weights_bytes(model.graph))
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
    if run.model.decoder is not None:
        report.token_bytes = token_bytes(model, plan, run.model.decoder, limits)


def _holds(file: Path, plan: Plan) -> bool:
    """Whether the plan was read from the file and has not changed since (--recipe): its user's comments stay then."""
    if plan.path is None or not file.exists() or not file.samefile(plan.path):
        return False
    return Plan.load(plan.path) == plan


def check_required(request: Request, plan: Plan) -> None:
    """Raise VerificationError when the plan falls short of `--require` in a subgraph that was selected."""
    require = request.require
    if require is None:
        return
    selected = selected_entries(request, plan)
    if request.require_fast:
        slow = list(slow_kernels(note_kernels(selected, request.target.capabilities)))
        if slow:
            raise VerificationError(f"--set require-fast=yes cannot be met: {'; '.join(slow)}")
    short = [
        entry
        for entry in selected
        if not entry.lowering.meets(require) and not kind_of(entry).covered_by(entry, plan.subgraphs, require)
    ]
    if short or not (selected or request.is_part):
        listed = (
            "; ".join(f"{entry.name}: {entry.decision} ({entry.reason})" for entry in short) or "no subgraph at all"
        )
        raise VerificationError(f"--require {require} cannot be met: {listed}")


def selected_entries(request: Request, plan: Plan) -> list[PlannedSubgraph]:
    """The entries whose weights `--require` is about."""
    selection = select(kinds_of(request), request.include, request.exclude)
    return [entry for entry in plan.subgraphs if kind_of(entry).has_weights and selection.unselected(entry) is None]


def kinds_of(request: Request) -> tuple[str, ...]:
    assert request.kinds is not None, "_of_task gives them"
    return request.kinds
