"""find -> plan -> calibrate -> rewrite -> build -> verify -> report; every arrow leaves a file to go on from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_nvfp4.builder.cache_support import check_caches_run
from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.export.decoder_contract import TOKENIZER, CacheOptions, decoder_of
from trt_nvfp4.builder.export.onnx_decoders import convert_decoder
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.inputs.decoder_profiles import decoder_profiles
from trt_nvfp4.builder.inputs.possible_shapes import check_possible
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shape_values import shape_values, value_profiles
from trt_nvfp4.builder.inputs.shapes import Profiles, derive_profiles, typical_of
from trt_nvfp4.builder.onnx_file import is_exported, is_rewritten, read, read_if_any, rewritten_by
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
    check_plan_target,
    check_required,
    given_plan,
    new_plan,
    take_plan,
)
from trt_nvfp4.builder.pipeline.progress import Progress, Silent
from trt_nvfp4.builder.pipeline.request import SURGERY, Request, check
from trt_nvfp4.builder.pipeline.surgery_step import operate
from trt_nvfp4.builder.report import html as html_report
from trt_nvfp4.builder.report.interface import interface
from trt_nvfp4.builder.report.report import Report, versions
from trt_nvfp4.builder.targets import require_here
from trt_nvfp4.builder.tensorrt.preflight import check_readable
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs
from trt_nvfp4.common.replacing import made_folder, scratch
from trt_nvfp4.graph_passes.load.faults import blaming, naming
from trt_nvfp4.graph_passes.load.source import checked, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.plan import DEFAULT_KINDS, KINDS, Plan
from trt_nvfp4.graph_passes.rewrite import rewrite

__all__ = ["Request", "run"]

# What a run makes of the model, the last first.
_MODELS = ("rewritten model", "model after surgery", "model with caches in place", "exported model")


def run(request: Request, progress: Progress | None = None) -> Report:
    """Carry out a request as far as it says; returns the report, which also lies beside the output.

    Raises BuilderError, ModelError, CalibrationError, ToolchainError or OSError; what had been finished stays, nothing
    is left half-written.
    """
    progress = progress or Silent()
    report = Report(model=str(request.model.absolute()), target=request.target.name, versions=versions())
    rewritten_already = is_rewritten(read_if_any(request.model))
    check(request, rewritten_already)
    if request.stop_after is None and request.bundle is None:
        require_here(request.target)
    with ExitStack() as made:
        for file in (request.base, request.timing_cache):
            if file is not None:
                made.enter_context(made_folder(file.parent))
        made.enter_context(blaming(request.model))
        made.enter_context(bounded_mapped_pages())
        if rewritten_already:
            return _resume_from_rewritten(request, report, progress)
        return _from_the_start(request, report, progress, made)


def _from_the_start(request: Request, report: Report, progress: Progress, made: ExitStack) -> Report:
    observer = None if request.dump_passes is None else PassDump(request.dump_passes)
    # Before an export, which takes minutes.
    check_disk(request)
    check_before_export(request)
    checkpoint = nvfp4_checkpoint(request)
    with report.timed("read"):
        progress.stage("reading the model")
        path, weights = _onnx_file(request, report, progress, made)
        original = path
        if request.surgery is not None:
            progress.stage(f"changing the graph with {request.surgery.name}")
            path = request.file(SURGERY)
            operate(original, request.surgery, path)
            report.files["model after surgery"] = str(path)
        if weights:
            made.enter_context(naming(request.model, path))
        request = _of_task(request, path)
        model = load(path, observer, weights)
        check_readable(path, read(path))
        specs = input_specs(path)
        try:
            profiles = _profiles(request, path, specs, shape_values(model.graph), report)
            check_possible(path, model, profiles)
        except BuilderError:
            # Shapes are not asked for where there is nothing to replace.
            if request.plan is None and not request.is_part:
                check_found(request, model, {subgraph.kind for subgraph in find_subgraphs(model)})
            raise
        if request.stop_after != "plan":
            check_samples(request, specs)
    with report.timed("plan"):
        progress.stage("finding and planning subgraphs")
        given = given_plan(request)
        model = convert_network(request, model, given, specs, report, progress)
        if observer is not None:
            observer("choose-types", model.ir_model)
        subgraphs = find_subgraphs(model)
        published = attach_published(request, subgraphs)
        if given is not None:
            given.check(model, request.target.capabilities, subgraphs)
        calibrated = calibrated_tensors(request, checkpoint, subgraphs)
        # Of the shapes that the engine is tuned for: a decoder's are those of the step that generates a token.
        of = subgraphs if given is None else given.subgraphs
        tokens = subgraph_tokens(model, of, typical_of(profiles[-1]))
        prefill = subgraph_tokens(model, of, typical_of(profiles[0])) if len(profiles) > 1 else None
        plan = given or new_plan(request, model, subgraphs, calibrated, tokens, checkpoint)
        if checkpoint is not None:
            check_checkpoint(checkpoint, subgraphs, request, plan, report)
        report.warnings += unused_cache_scales(request, published, subgraphs, plan)
        check_toolchain(request, plan)
        if request.accuracy_budget is None:
            if request.stop_after != "plan":
                check_data(request, model, subgraphs, plan)
            take_plan(request, model, plan, tokens, calibrated, report, prefill)
    if request.accuracy_budget is None and request.stop_after == "plan":
        return _finish(request, report, path)

    with report.timed("calibrate"):
        statistics = calibrate(request, model, subgraphs, specs, plan, calibrated, report, progress)
    if request.accuracy_budget is not None:
        with report.timed("choose"):
            plan = choose_plan(request, model, subgraphs, specs, plan, statistics, tokens, report, progress, checkpoint)
            take_plan(request, model, plan, tokens, calibrated, report, prefill)
        if request.stop_after == "plan":
            return _finish(request, report, path)
    if request.stop_after == "calibrate":
        return _finish(request, report, path)

    with report.timed("rewrite"):
        progress.stage("quantizing weights and rewriting")
        destination = request.file(".rewritten.onnx")
        rewritten = rewrite(model, plan, statistics, destination, progress.step, checkpoint, subgraphs, observer)
        if request.dump_passes is not None:
            report.files["graph after each pass"] = str(request.dump_passes)
        report.files["rewritten model"] = str(rewritten.path)
        report.weights_bytes = {"before": rewritten.weights_bytes_before, "after": rewritten.weights_bytes_after}
    with report.timed("compare"):
        report.accuracy = measure_accuracy(request, specs, model, original, rewritten.path, progress)
    # The build needs the memory.
    del model, subgraphs, of
    if request.stop_after == "rewrite":
        return _finish(request, report, path)

    build(request, plan, rewritten.path, profiles, report, progress)
    return _finish(request, report)


def _resume_from_rewritten(request: Request, report: Report, progress: Progress) -> Report:
    """Build from what `--stop-after rewrite` left: the rewritten model, and the plan to check the engine against."""
    if request.plan is None:
        raise BuilderError(
            USAGE, f"{request.model} has been rewritten already; add --plan with the plan that it follows"
        )
    check_readable(request.model, checked(request.model))
    plan = Plan.load(request.plan)
    request = _of_task(request, request.model)
    check_plan_target(request, plan)
    report.warnings += slow_kernels(note_kernels(plan.subgraphs, request.target.capabilities))
    report.take_plan(plan, calibrated=rewritten_by(request.model)["calibrated"])
    check_required(request, plan)
    values = shape_values(ir.from_proto(read(request.model)).graph)
    profiles = _profiles(request, request.model, input_specs(request.model), values, report)
    build(request, plan, request.model, profiles, report, progress)
    return _finish(request, report)


def _of_task(request: Request, path: Path) -> Request:
    """The request with the default kinds of the model: a decoder reads all its weights for every token."""
    if request.kinds is not None:
        return request
    return replace(request, kinds=DEFAULT_KINDS if decoder_of(read(path)) is None else KINDS)


def _profiles(
    request: Request, path: Path, specs: Mapping[str, InputSpec], values: Mapping[str, int], report: Report
) -> list[Profiles]:
    """The engine's optimization profiles: one, or a decoder's two, prefill and decode. `values` are the inputs whose
    values are a shape."""
    shapes = {name: spec.shape for name, spec in specs.items() if name not in values}
    given = (request.least, request.typical, request.most)
    # A misspelt name is told with all names.
    least, typical, most = ({name: bound[name] for name in bound if name not in values} for bound in given)
    decoder = decoder_of(read(path))
    if decoder is not None:
        profiles = decoder_profiles(shapes, decoder, least, typical, most)
    else:
        longest = export.longest_sequence(request.model, request.trust_remote_code)
        profiles = [derive_profiles(shapes, least, typical, most, longest)]
    report.profiles, *further = [
        {name: [list(p.least), list(p.typical), list(p.most)] for name, p in profile.items()} for profile in profiles
    ]
    report.decode_profiles = further[0] if further else {}
    ranges = value_profiles(values, given)
    report.shape_values = {name: [list(p.least), list(p.typical), list(p.most)] for name, p in ranges.items()}
    return [{**profile, **ranges} for profile in profiles]


def _onnx_file(
    request: Request, report: Report, progress: Progress, made: ExitStack
) -> tuple[Path, Mapping[str, ir.TensorProtocol]]:
    """The model's ONNX file, and those of its weights that are not in it, by name. One without them lies in a folder
    that `made` removes."""
    if request.cache == "inplace":
        progress.stage(f"converting the caches of {request.model.name}")
        converted = request.file(".inplace.onnx")
        convert_decoder(request.model, converted, request.cache_capacity, request.max_batch or 1)
        report.files["model with caches in place"] = str(converted)
        return converted, {}
    if not request.model.is_dir():
        given = read_if_any(request.model)
        if given is not None and decoder_of(given) is not None:
            check_caches_run(request.model)
        return request.model, {}
    progress.stage(f"exporting {request.model.name} to ONNX")
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1, request.all_logits)
    exported, own = request.file(".onnx"), (request.trust_remote_code, request.adapter)
    weights: Mapping[str, ir.TensorProtocol] = {}
    if request.runs_model:
        export.export(request.model, exported, request.task, cache, *own)
    else:
        graph = made.enter_context(scratch(exported.parent)) / exported.name
        weights = export.export_by_reference(request.model, graph, request.task, cache, *own)
        if weights:
            if is_exported(read_if_any(exported)):  # an earlier one would pass for this engine's
                exported.unlink()
                exported.with_name(f"{exported.name}.data").unlink(missing_ok=True)
            exported = graph
        else:
            exported.unlink(missing_ok=True)  # which beside other weights would pass for whole
            exported.with_name(f"{exported.name}.data").unlink(missing_ok=True)
            for file in sorted(graph.parent.iterdir(), reverse=True):
                os.replace(file, exported.with_name(file.name))
    if not weights:
        report.files["exported model"] = str(exported)
    decoder = decoder_of(read(exported))
    report.exported = {
        "task": "features" if decoder is None else "generate",
        "cache_capacity": None if decoder is None else decoder.capacity,
        "max_batch": decoder.max_batch if decoder else 1,
        "all_logits": request.all_logits,
        "adapter": None if request.adapter is None else str(request.adapter.absolute()),
    }
    if decoder is not None:
        copied = copy_tokenizer(request.model, request.base.parent / TOKENIZER)
        if copied is not None:
            report.files["tokenizer"] = str(copied)
    return exported, weights


def _finish(request: Request, report: Report, exported: Path | None = None) -> Report:
    # The engine's own, where it was rewritten.
    model = next((report.files[what] for what in _MODELS if what in report.files), exported or request.model)
    report.inputs, report.outputs = interface(read(Path(model)))
    report.files["report"] = str(request.file(".report.json"))
    report.files["page"] = str(request.file(".report.html"))
    report.save(request.file(".report.json"))
    html_report.write(request.file(".report.json"))
    return report
