"""find -> plan -> calibrate -> rewrite -> build -> verify -> report; every arrow leaves a file to go on from."""

from contextlib import ExitStack

import onnx_ir as ir

from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shape_values import shape_values
from trt_nvfp4.builder.inputs.shapes import opt_shapes_of
from trt_nvfp4.builder.model.model import Model
from trt_nvfp4.builder.model.onnx_file import is_rewritten, read_if_any, rewritten_by
from trt_nvfp4.builder.pipeline.accuracy_step import choose_plan, measure_accuracy
from trt_nvfp4.builder.pipeline.build_step import build, check_toolchain
from trt_nvfp4.builder.pipeline.calibrate_step import (
    calibrate,
    calibrated_tensors,
    check_data,
    check_samples,
    convert_network,
)
from trt_nvfp4.builder.pipeline.checkpoint_step import (
    attach_published,
    check_checkpoint,
    nvfp4_checkpoint,
    unused_cache_scales,
)
from trt_nvfp4.builder.pipeline.disk_space import check_disk
from trt_nvfp4.builder.pipeline.export_checks import check_before_export
from trt_nvfp4.builder.pipeline.mapped_pages import bounded_mapped_pages
from trt_nvfp4.builder.pipeline.pass_dump import PassDump
from trt_nvfp4.builder.pipeline.plan_step import (
    check_found,
    check_required,
    given_plan,
    new_plan,
    take_plan,
)
from trt_nvfp4.builder.pipeline.read_step import read_model, set_possible_profiles, set_profiles, take_model
from trt_nvfp4.builder.pipeline.request import Request, with_needs_of_budget
from trt_nvfp4.builder.pipeline.request_checks import check
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.builder.report import html as html_report
from trt_nvfp4.builder.report.interface import interface
from trt_nvfp4.builder.report.report import Report, versions
from trt_nvfp4.builder.targets import require_here
from trt_nvfp4.builder.tensorrt.preflight import check_readable
from trt_nvfp4.builder.terminal.progress import Progress, Silent
from trt_nvfp4.common.replacing import made_folder
from trt_nvfp4.graph_passes.ir.passes import Observer
from trt_nvfp4.graph_passes.load.faults import blaming
from trt_nvfp4.graph_passes.load.source import checked, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import rewrite

__all__ = ["Request", "run"]


def run(request: Request, progress: Progress | None = None) -> Report:
    """Carry out a request as far as it says; returns the report, which also lies beside the output.

    Raises BuilderError, ModelError, CalibrationError, ToolchainError or OSError; what had been finished stays, nothing
    is left half-written.
    """
    report = Report(model=str(request.model.absolute()), target=request.target.name, versions=versions())
    given = read_if_any(request.model)
    check(request, given)
    this = Run(with_needs_of_budget(request), report, progress or Silent(), given)
    if request.stop_after is None and request.bundle is None:
        require_here(request.target)
    with ExitStack() as made:
        for file in (request.base, request.timing_cache):
            if file is not None:
                made.enter_context(made_folder(file.parent))
        made.enter_context(blaming(request.model))
        made.enter_context(bounded_mapped_pages())
        if is_rewritten(this.given):
            _resume_from_rewritten(this)
        else:
            _from_the_start(this, made)
        return _finish(this)


def _from_the_start(run: Run, made: ExitStack) -> None:
    """The steps in their order, as far as `--stop-after` says."""
    request, report = run.request, run.report
    observer = None if request.dump_passes is None else PassDump(request.dump_passes)
    # Before an export, which takes minutes.
    check_disk(request)
    check_before_export(request)
    run.checkpoint = nvfp4_checkpoint(request)
    with report.timed("read"):
        _read(run, made, observer)
    with report.timed("plan"):
        _plan(run, observer)
    if request.accuracy_budget is None and request.stop_after == "plan":
        return
    with report.timed("calibrate"):
        run.statistics = calibrate(run)
    if request.accuracy_budget is not None:
        with report.timed("choose"):
            run.plan = choose_plan(run)
            take_plan(run)
    if request.stop_after in ("plan", "calibrate"):
        return
    rewritten = _rewrite(run, observer)
    if request.stop_after != "rewrite":
        build(run, rewritten)


def _read(run: Run, made: ExitStack, observer: Observer | None) -> None:
    """The model, its graph and the shapes it is built for; input samples are checked against it."""
    run.progress.stage("reading the model")
    read_model(run, made)
    run.network = load(run.model, observer, run.model.weights)
    check_readable(run.model.path, run.model.proto)
    if run.request.triton is not None and run.model.decoder is not None:
        raise UsageError(
            f"--set triton={run.request.triton}: {run.request.model} generates text, which Triton's TensorRT backend "
            "does not do by itself; leave it out, and serve the engine (trt-nvfp4 serve)"
        )
    try:
        set_possible_profiles(run, shape_values(run.network.graph))
    except BuilderError:
        # Without anything to replace, shapes do not matter.
        if run.request.plan is None and not run.request.is_part:
            check_found(run, {subgraph.kind for subgraph in find_subgraphs(run.network)})
        raise
    if run.request.stop_after != "plan":
        check_samples(run.request, run.model.specs)


def _plan(run: Run, observer: Observer | None) -> None:
    """The subgraphs, and the plan for them: written, but for a budget, which changes it."""
    request = run.request
    run.progress.stage("finding and planning subgraphs")
    given = given_plan(request)
    run.network = convert_network(run, given)
    if observer is not None:
        observer("choose-types", run.network.ir_model)
    run.subgraphs = find_subgraphs(run.network)
    run.published = attach_published(run)
    if given is not None:
        given.check(run.network, request.target.capabilities, run.subgraphs)
    run.calibrated = calibrated_tensors(run)
    # In the shapes that the engine is tuned for: a decoder's are those of the step that generates a token.
    counted = run.subgraphs if given is None else given.subgraphs
    run.tokens = subgraph_tokens(run.network, counted, opt_shapes_of(run.profiles[-1]))
    if len(run.profiles) > 1:
        run.prefill = subgraph_tokens(run.network, counted, opt_shapes_of(run.profiles[0]))
    run.plan = given or new_plan(run)
    check_checkpoint(run)
    run.report.warnings += unused_cache_scales(run)
    check_toolchain(request, run.plan)
    if request.accuracy_budget is None:
        if request.stop_after != "plan":
            check_data(run)
        take_plan(run)


def _rewrite(run: Run, observer: Observer | None) -> Model:
    """The rewritten model, compared with the original; the original is forgotten."""
    request, report = run.request, run.report
    with report.timed("rewrite"):
        run.progress.stage("quantizing weights and rewriting")
        rewritten = rewrite(
            run.network,
            run.plan,
            run.statistics,
            request.file(".rewritten.onnx"),
            run.progress.step,
            run.checkpoint,
            run.subgraphs,
            observer,
        )
        if request.dump_passes is not None:
            report.files["graph after each pass"] = str(request.dump_passes)
        report.files["rewritten model"] = str(rewritten.path)
        report.weights_bytes = {"before": rewritten.weights_bytes_before, "after": rewritten.weights_bytes_after}
    model = Model(rewritten.path, request.model)
    with report.timed("compare"):
        report.accuracy = measure_accuracy(run, model)
    run.release(model)
    return model


def _resume_from_rewritten(run: Run) -> None:
    """Build from what `--stop-after rewrite` left: the rewritten model, and the plan to check the engine against."""
    request, report = run.request, run.report
    if request.plan is None:
        raise UsageError(f"{request.model} has been rewritten already; add --plan with the plan that it follows")
    run.model = Model(request.model, request.model, run.given)
    check_readable(request.model, checked(run.model))
    run.plan = Plan.load(request.plan)
    take_model(run)
    report.warnings += slow_kernels(note_kernels(run.plan.subgraphs, request.target.capabilities))
    report.take_plan(run.plan, calibrated=rewritten_by(run.model)["calibrated"])
    check_required(run.request, run.plan)
    set_profiles(run, shape_values(ir.from_proto(run.model.proto).graph))
    build(run, run.model)


def _finish(run: Run) -> Report:
    request, report = run.request, run.report
    report.inputs, report.outputs = interface(run.model.proto)
    report.files["report"] = str(request.file(".report.json"))
    report.files["page"] = str(request.file(".report.html"))
    report.save(request.file(".report.json"))
    html_report.write(request.file(".report.json"))
    return report
