"""find -> plan -> calibrate -> rewrite -> build -> verify -> report; every arrow leaves a file to go on from."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from trt_nvfp4.builder import roofline
from trt_nvfp4.builder.accuracy.compare import compare
from trt_nvfp4.builder.accuracy.precision_search import Part, choose_precisions, with_all_statistics
from trt_nvfp4.builder.accuracy.runners import Side
from trt_nvfp4.builder.errors import BUILD_FAILED, MODEL_AT_FAULT, USAGE, VERIFICATION_FAILED, BuilderError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.export.decoder_contract import TOKENIZER, CacheOptions, decoder_of
from trt_nvfp4.builder.export.onnx_decoders import convert_decoder
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.inputs.decoder_profiles import decoder_profiles
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shapes import Profiles, derive_profiles, typical_of
from trt_nvfp4.builder.onnx_file import is_rewritten, read, read_if_any, rewritten_by
from trt_nvfp4.builder.pipeline.progress import Progress, Silent
from trt_nvfp4.builder.pipeline.request import Request, check
from trt_nvfp4.builder.report import html as html_report
from trt_nvfp4.builder.report.report import Report, versions
from trt_nvfp4.builder.targets import require_here
from trt_nvfp4.builder.tensorrt import build_process as engine
from trt_nvfp4.builder.tensorrt import bundle
from trt_nvfp4.builder.tensorrt.preflight import check_readable
from trt_nvfp4.builder.tensorrt.verify import PLUGINS
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import DEFAULT, parse
from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, SampleRange, input_specs, load_samples
from trt_nvfp4.calibration.statistics.collection import observable
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.replacing import made_folder, replacing, scratch
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel, load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose, observed_tensors
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.coverage import unplanned_products
from trt_nvfp4.graph_passes.planning.kernels import KernelClass, note_kernels
from trt_nvfp4.graph_passes.planning.plan import (
    DEFAULT_KINDS,
    KINDS,
    NVFP4,
    Plan,
    PlannedSubgraph,
    has_ranges,
    make_plan,
    selection,
)
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, check_statistics, original_weights_bytes, rewrite
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices, packed_ranges
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.compile.toolchain import ToolchainError

__all__ = ["Request", "run"]

LARGEST_FLOAT16 = 65504
# So many samples are calibrated on before some are held out to measure accuracy with.
ENOUGH_SAMPLES = 4


def run(request: Request, progress: Progress | None = None) -> Report:
    """Carry out a request as far as it says; returns the report, which also lies beside the output.

    Raises BuilderError, ModelError, CalibrationError, ToolchainError or OSError; what had been finished stays, nothing
    is left half-written.
    """
    progress = progress or Silent()
    report = Report(model=str(request.model), target=request.target.name, versions=versions())
    rewritten_already = is_rewritten(read_if_any(request.model))
    check(request, rewritten_already)
    if request.stop_after is None and request.bundle is None:
        require_here(request.target)
    with ExitStack() as made:
        for file in (request.base, request.timing_cache):
            if file is not None:
                made.enter_context(made_folder(file.parent))
        return (_go_on if rewritten_already else _from_the_start)(request, report, progress)


def _from_the_start(request: Request, report: Report, progress: Progress) -> Report:
    # Before an export, which takes minutes.
    checkpoint = None if request.packed_weights is None else NVFP4Checkpoint(request.packed_weights)
    with report.timed("read"):
        progress.stage("reading the model")
        path = _onnx_file(request, report, progress)
        check_readable(path, read(path))
        request = _of_task(request, path)
        model = load(path)
        specs = input_specs(path)
        profiles = _profiles(request, path, specs, report)
    with report.timed("plan"):
        progress.stage("finding and planning subgraphs")
        given = _given_plan(request)
        model = _converted(request, model, given, specs, report, progress)
        if given is not None:
            given.check(model, request.target.capabilities)
        # A given plan finds its own.
        subgraphs = find_subgraphs(model) if given is None or checkpoint is not None else []
        calibrated = _calibrated(request, checkpoint, subgraphs)
        # Of the shapes that the engine is tuned for: a decoder's are those of the step that generates a token.
        planned = subgraphs if given is None else given.subgraphs
        tokens = subgraph_tokens(model, planned, typical_of(profiles[-1]))
        plan = given or _new_plan(request, model, subgraphs, calibrated, tokens)
        if checkpoint is not None:
            _check_packed(checkpoint, subgraphs, request, plan, report)
        if request.accuracy_budget is None:
            if request.stop_after != "plan":
                _check_data(request, model, specs, plan)
            _take_plan(request, model, plan, tokens, calibrated, report)
    if request.accuracy_budget is None and request.stop_after == "plan":
        return _finish(request, report)

    with report.timed("calibrate"):
        statistics = _calibrate(request, model, specs, plan, calibrated, report, progress)
    if request.accuracy_budget is not None:
        with report.timed("choose"):
            plan = _choose(request, model, specs, plan, statistics, tokens, report, progress)
            _take_plan(request, model, plan, tokens, calibrated, report)
        if request.stop_after == "plan":
            return _finish(request, report)
    if request.stop_after == "calibrate":
        return _finish(request, report)

    with report.timed("rewrite"):
        progress.stage("quantizing weights and rewriting")
        destination = request.file(".rewritten.onnx")
        rewritten = rewrite(model, plan, statistics, destination, progress.step, checkpoint)
        report.files["rewritten model"] = str(rewritten.path)
        report.weights_bytes = {"before": rewritten.weights_bytes_before, "after": rewritten.weights_bytes_after}
    with report.timed("compare"):
        report.accuracy = _accuracy(request, specs, model, rewritten.path, progress)
    # The build needs the memory.
    del model
    if request.stop_after == "rewrite":
        return _finish(request, report)

    _build(request, plan, rewritten.path, profiles, report, progress)
    return _finish(request, report)


def _go_on(request: Request, report: Report, progress: Progress) -> Report:
    """Build from what `--stop-after rewrite` left: the rewritten model, and the plan to check the engine against."""
    if request.plan is None:
        raise BuilderError(
            USAGE, f"{request.model} has been rewritten already; add --plan with the plan that it follows"
        )
    check_readable(request.model, read(request.model))
    plan = Plan.load(request.plan)
    request = _of_task(request, request.model)
    _check_plan_target(request, plan)
    report.warnings += slow_kernels(note_kernels(plan.subgraphs, request.target.capabilities))
    report.take_plan(plan, calibrated=rewritten_by(read(request.model))["calibrated"])
    check_required(request, plan)
    profiles = _profiles(request, request.model, input_specs(request.model), report)
    _build(request, plan, request.model, profiles, report, progress)
    return _finish(request, report)


def _of_task(request: Request, path: Path) -> Request:
    """The request with the default kinds of the model: a decoder reads all its weights for every token."""
    if request.kinds is not None:
        return request
    return replace(request, kinds=DEFAULT_KINDS if decoder_of(read(path)) is None else KINDS)


def _profiles(request: Request, path: Path, specs: Mapping[str, InputSpec], report: Report) -> list[Profiles]:
    """The engine's optimization profiles: one, or a decoder's two, prefill and decode."""
    shapes = {name: spec.shape for name, spec in specs.items()}
    decoder = decoder_of(read(path))
    if decoder is not None:
        profiles = decoder_profiles(shapes, decoder, request.least, request.typical, request.most)
    else:
        longest = export.longest_sequence(request.model, request.trust_remote_code)
        profiles = [derive_profiles(shapes, request.least, request.typical, request.most, longest)]
    report.profiles, *further = [
        {name: [p.least, p.typical, p.most] for name, p in profile.items()} for profile in profiles
    ]
    report.decode_profiles = further[0] if further else {}
    return profiles


def _check_plan_target(request: Request, plan: Plan) -> None:
    if plan.target != request.target.name:
        raise BuilderError(
            USAGE,
            f"{request.plan} is a plan for {plan.target}, not for {request.target.name}; plan again or change --target",
        )


def check_required(request: Request, plan: Plan) -> None:
    """Raise BuilderError (verification) when the plan falls short of `--require` in a subgraph that was selected."""
    require = request.require
    if require is None:
        return
    enough = NVFP4 if require == "nvfp4" else (*NVFP4, "fp8")
    selected = _selected(request, plan)
    if request.require_fast:
        slow = list(slow_kernels(note_kernels(selected, request.target.capabilities)))
        if slow:
            raise BuilderError(VERIFICATION_FAILED, f"--require-fast cannot be met: {'; '.join(slow)}")
    short = [entry for entry in selected if entry.decision not in enough and not _apart(entry, plan, enough)]
    if short or not selected:
        listed = (
            "; ".join(f"{entry.name}: {entry.decision} ({entry.reason})" for entry in short) or "no subgraph at all"
        )
        raise BuilderError(VERIFICATION_FAILED, f"--require {require} cannot be met: {listed}")


def slow_kernels(kernels: Mapping[str, KernelClass]) -> Iterator[str]:
    """A warning for each reason for which subgraphs, by name, run on generic kernels."""
    groups: dict[KernelClass, list[str]] = {}
    for name, found in kernels.items():
        if found.is_generic:
            groups.setdefault(found, []).append(name)
    for found, names in groups.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield (f"generic kernels, correct and slow, serve {', '.join(names[:2])}{more}: {found.why}; {found.remedy}")


def _apart(entry: PlannedSubgraph, plan: Plan, enough: Collection[str]) -> bool:
    """Whether the linears of an MLP that cannot be replaced as one, all of its weights, are planned well enough."""
    if entry.kind not in ("mlp", "gated_mlp"):
        return False
    linears = [
        part
        for part in plan.subgraphs
        if part.kind == "linear" and part.decision in enough and set(part.nodes) <= set(entry.nodes)
    ]
    return sum(map(_weights, linears)) == _weights(entry)


def _weights(entry: PlannedSubgraph) -> int:
    return sum(gemm.n * gemm.k * gemm.count for gemm in roofline.gemms(entry.kind, entry.shapes))


def _selected(request: Request, plan: Plan) -> list[PlannedSubgraph]:
    why_not = selection(_kinds(request), request.include, request.exclude)
    return [entry for entry in plan.subgraphs if why_not(entry) is None]


def _kinds(request: Request) -> tuple[str, ...]:
    assert request.kinds is not None, "_of_task gives them"
    return request.kinds


def _take_plan(
    request: Request,
    model: SourceModel,
    plan: Plan,
    tokens: Mapping[str, int],
    calibrated: bool | Collection[str],
    report: Report,
) -> None:
    # Before it is written beside what an earlier run built.
    check_required(request, plan)
    kernels = note_kernels(plan.subgraphs, request.target.capabilities)
    report.warnings += slow_kernels(kernels)
    file = request.file(".plan.yaml")
    if not _holds(file, plan):
        plan.save(file)
    report.files["plan"] = str(file)
    report.take_plan(plan, calibrated)
    report.unplanned = {kind: asdict(found) for kind, found in unplanned_products(model, plan).items()}
    limits = roofline.LIMITS[request.target.name]
    predicted = roofline.predict(plan, tokens, limits, request.target.capabilities)
    of = roofline.share(plan, tokens, predicted, original_weights_bytes(model.graph))
    report.predicted = {**asdict(limits), "of": of, "subgraphs": predicted}


def _holds(file: Path, plan: Plan) -> bool:
    """Whether the plan was read from the file and has not changed since (--recipe): its user's comments stay then."""
    if plan.path is None or not file.exists() or not file.samefile(plan.path):
        return False
    return Plan.load(plan.path) == plan


def _onnx_file(request: Request, report: Report, progress: Progress) -> Path:
    if request.cache == "inplace":
        progress.stage(f"converting the caches of {request.model.name}")
        converted = request.file(".inplace.onnx")
        convert_decoder(request.model, converted, request.cache_capacity, request.max_batch or 1)
        report.files["model with caches in place"] = str(converted)
        return converted
    if not request.model.is_dir():
        return request.model
    progress.stage(f"exporting {request.model.name} to ONNX")
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1, request.all_logits)
    exported = export.export(request.model, request.file(".onnx"), request.task, cache, request.trust_remote_code)
    report.files["exported model"] = str(exported)
    if decoder_of(read(exported)) is not None:
        copied = copy_tokenizer(request.model, exported.parent / TOKENIZER)
        if copied is not None:
            report.files["tokenizer"] = str(copied)
    return exported


def _calibrated(
    request: Request, checkpoint: NVFP4Checkpoint | None, subgraphs: Sequence[Subgraph]
) -> bool | Collection[str]:
    """Whether there will be statistics of activations, or of which tensors the checkpoint has the ranges."""
    if request.calib_data is not None or checkpoint is None:
        return request.calib_data is not None
    return packed_ranges(checkpoint, subgraphs).keys()


def _given_plan(request: Request) -> Plan | None:
    """The plan that the user hands in, for this target."""
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    if request.recipe is not None:
        plan.recipe = str(parse(request.recipe))
    _check_plan_target(request, plan)
    return plan


def _converted(
    request: Request,
    model: SourceModel,
    given: Plan | None,
    specs: Mapping[str, InputSpec],
    report: Report,
    progress: Progress,
) -> SourceModel:
    """The model in 16 bits, where it is in float32: as the plan says that was handed in, or as it was asked for."""
    if given is not None:
        return convert(model, given.activations)
    ranges: dict[str, float] = {}
    if request.activations == "fp16":
        ranges = _ranges(request, model, specs, report, progress)
    try:
        activations = choose(model, request.activations, request.keep_fp32, ranges)
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error
    if activations.note:
        report.warnings.append(f"the network stays float32, on slow kernels: {activations.note}")
    return convert(model, activations)


def _ranges(
    request: Request, model: SourceModel, specs: Mapping[str, InputSpec], report: Report, progress: Progress
) -> dict[str, float]:
    """Largest magnitudes of the network's tensors on the calibration data."""
    if request.calib_data is None or is_statistics(request.calib_data):
        report.warnings.append(
            "--activations fp16 without input samples: values beyond 65504 become infinite, and nothing tells which "
            "are; add --calib-data FILE|DIR with samples, or choose bf16"
        )
        return {}
    progress.stage("looking for values beyond FP16's range")
    names = observable(model.path, observed_tensors(model))
    return dict(collect(model.path, dict.fromkeys(names, ()), _samples(request, specs), progress=progress.step).amax)


def _new_plan(
    request: Request,
    model: SourceModel,
    subgraphs: Sequence[Subgraph],
    calibrated: bool | Collection[str],
    tokens: Mapping[str, int],
) -> Plan:
    try:
        plan = make_plan(
            model,
            subgraphs,
            request.target.capabilities,
            precision=request.precision,
            kinds=_kinds(request),
            include=request.include,
            exclude=request.exclude,
            calibrated=calibrated,
            recipe=request.recipe or DEFAULT,
            moe=request.moe,
            tokens=tokens if _tokens_decide(request) else None,
        )
    except ModelError:
        raise
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error
    kinds = sorted({entry.kind for entry in plan.subgraphs})
    if not set(kinds) & set(_kinds(request)):
        hint = f"; it has some of kind {', '.join(kinds)}: add --kinds {','.join(kinds)}" if kinds else ""
        raise BuilderError(
            MODEL_AT_FAULT, f"{model.path}: found no subgraph of kind {' or '.join(_kinds(request))}{hint}"
        )
    if not _selected(request, plan):
        name = next(entry.name for entry in plan.subgraphs if entry.kind in _kinds(request))
        raise BuilderError(
            USAGE,
            f"{model.path}: --include and --exclude leave no subgraph to replace; they are matched against names such "
            f"as '{name}'",
        )
    return plan


def _tokens_decide(request: Request) -> bool:
    """Whether the plan weighs NVFP4 against FP8 by tokens: no FP4 on the target, and nothing else asked for."""
    return (
        not request.target.fp4_instructions
        and request.precision == "auto"
        and request.require != "nvfp4"
        and request.packed_weights is None
        and request.accuracy_budget is None
    )


def _check_data(request: Request, model: SourceModel, specs: Mapping[str, InputSpec], plan: Plan) -> None:
    """Raise CalibrationError for data that the run would fail of, as far as its first sample shows: before the plan is
    written beside the engine and the rewritten model of an earlier run, which follow that run's plan.
    """
    if request.calib_data is None:
        check_statistics(plan, None)
    elif not is_statistics(request.calib_data):
        next(iter(_samples(request, specs)))
    elif calibration_tensors(plan):
        check_statistics(plan, Statistics.load(request.calib_data, model.path))


def _calibrate(
    request: Request,
    model: SourceModel,
    specs: Mapping[str, InputSpec],
    plan: Plan,
    calibrated: bool | Collection[str],
    report: Report,
    progress: Progress,
) -> Statistics | None:
    """Activation statistics from the user's samples, or from an earlier run's statistics file; None without data."""
    if request.calib_data is None:
        unknown = [entry for entry in plan.subgraphs if not has_ranges(entry, calibrated)]
        if not any(entry.decision in (*NVFP4, "fp8") for entry in unknown):
            return None  # data would change nothing
        scaled = any(entry.decision == "nvfp4_w4a4" or entry.fp8_plugin for entry in unknown)
        consequence = "quantized activations are scaled at run time" if scaled else "activations are not quantized"
        report.warnings.append(f"no calibration data, so {consequence}; add --calib-data FILE|DIR with input samples")
        return None
    progress.stage("calibrating")
    budget = request.accuracy_budget is not None
    tensors = calibration_tensors(with_all_statistics(plan, model, request.target) if budget else plan)
    if not tensors:
        report.warnings.append(f"no decision of the plan uses activation statistics: {request.calib_data} is not read")
        return None
    if is_statistics(request.calib_data):
        return Statistics.load(request.calib_data, model.path)
    samples = _samples(request, specs)
    destination = request.file(".statistics.json")
    statistics = collect(model.path, tensors, samples, progress=progress.step, resume=destination)
    statistics.save(destination)
    report.warnings += _doubts(plan, tensors, statistics, str(request.calib_data))
    report.files["statistics"] = str(destination)
    return statistics


def _doubts(plan: Plan, tensors: Collection[str], statistics: Statistics, source: str) -> Iterator[str]:
    """What the statistics of `tensors` say against the samples from `source`, or against the model."""
    if dead := [name for name in tensors if statistics.amax.get(name) == 0]:
        yield (
            f"the samples leave {len(dead)} of {len(tensors)} tensors at 0 ({dead[0]}, ...), so that nothing is known "
            f"of their range, and no scale is set for them: does {source} hold real inputs?"
        )
    # ONNX Runtime computes float16 in float32 on a CPU.
    halves = {name for entry in plan.subgraphs if entry.dtype == "float16" for name in entry.linear_inputs}
    if over := [name for name in tensors if name in halves and statistics.amax.get(name, 0.0) > LARGEST_FLOAT16]:
        yield (
            f"the samples take {len(over)} of {len(tensors)} tensors beyond {LARGEST_FLOAT16}, float16's largest "
            f"({over[0]} to {statistics.amax[over[0]]:.3g}, ...), where a GPU computes infinity: give the model in "
            "bfloat16 or float32"
        )


def _samples(request: Request, specs: Mapping[str, InputSpec], held_out: bool = False) -> Iterable[Sample]:
    """The samples to calibrate with, or those `held_out` to verify an accuracy budget, or measure accuracy, with."""
    assert request.calib_data is not None
    tokenizer = request.model if request.model.is_dir() else request.model.parent
    if held_out and request.accuracy_data is not None:
        return load_samples(request.accuracy_data, specs, tokenizer, request.trust_remote_code)
    samples = load_samples(request.calib_data, specs, tokenizer, request.trust_remote_code)
    if request.accuracy_budget is not None:
        return Part(samples, held_out) if request.accuracy_data is None else samples
    if not _has_spare(request, samples):
        return samples
    assert isinstance(samples, Sized)
    last = len(samples) - min(request.accuracy_samples, len(samples) - ENOUGH_SAMPLES)
    return SampleRange(samples, last, len(samples)) if held_out else SampleRange(samples, 0, last)


def _has_spare(request: Request, samples: Iterable[Sample]) -> bool:
    """Whether accuracy is measured on samples that are not calibrated on."""
    return request.accuracy_samples > 0 and isinstance(samples, Sized) and len(samples) > ENOUGH_SAMPLES


def _choose(
    request: Request,
    model: SourceModel,
    specs: Mapping[str, InputSpec],
    plan: Plan,
    statistics: Statistics | None,
    tokens: Mapping[str, int],
    report: Report,
    progress: Progress,
) -> Plan:
    """The plan with the cheapest precisions that meet the accuracy budget."""
    assert request.accuracy_budget is not None
    progress.stage(f"choosing precisions for {request.accuracy_budget}")
    choice = choose_precisions(
        model,
        plan,
        statistics,
        request.target,
        request.accuracy_budget,
        choosing=_samples(request, specs),
        held_out=_samples(request, specs, held_out=True),
        tokens=tokens,
        require=request.require,
        progress=progress,
        folder=request.base.parent,
    )
    report.budget = choice.numbers
    report.warnings += choice.warnings
    return choice.plan


def _check_packed(
    checkpoint: NVFP4Checkpoint, subgraphs: Sequence[Subgraph], request: Request, plan: Plan, report: Report
) -> None:
    """Raise BuilderError (usage) where nothing in the plan takes weights of the checkpoint; name what it lacks."""
    planned = {entry.name for entry in plan.subgraphs if entry.decision.startswith("nvfp4")}
    if not planned:
        raise BuilderError(
            USAGE,
            f"{request.packed_weights}: the plan has no NVFP4 plugin, so that packed weights have no use; "
            "leave --packed-weights out, or choose --precision auto or nvfp4",
        )
    held = {part.name: held_matrices(checkpoint, part) for part in subgraphs if part.name in planned}
    absent = [name for name, matrices in held.items() if not all(matrices)]
    if not any(map(any, held.values())):
        raise BuilderError(
            USAGE,
            f"{request.packed_weights}: holds NVFP4 weights of none of the {len(planned)} subgraphs in the plan, such "
            f"as '{absent[0]}'; it has such as '{next(iter(checkpoint))}'",
        )
    if absent:
        report.warnings.append(
            f"{request.packed_weights} lacks weights of {', '.join(absent)}: quantized from the model's own"
        )


def _accuracy(
    request: Request, specs: Mapping[str, InputSpec], model: SourceModel, rewritten: Path, progress: Progress
) -> dict[str, Any]:
    """Agreement of the rewritten model with the original on some of the user's samples, or why there is none; of a
    float32 network that became one of 16 bits, also what that alone does to the outputs ("network")."""
    data = request.calib_data
    if data is None or is_statistics(data) or not request.accuracy_samples:
        return {"not_measured": "no input samples to measure with (--calib-data, --accuracy-samples)"}
    progress.stage("comparing with the original")

    def samples(_: Mapping[str, InputSpec]) -> Iterator[Sample]:
        chosen = itertools.islice(_samples(request, specs, held_out=True), request.accuracy_samples)
        for number, sample in enumerate(chosen, 1):
            yield sample
            progress.step(number, request.accuracy_samples, f"sample {number}")

    converted = model.activations.dtype is not None
    original = Side.of(model.path)
    try:
        found = compare(original, replace(Side.of(rewritten), rounding=converted), samples)
        accuracy = {
            "samples": found.samples,
            "held_out": isinstance(_samples(request, specs), (Part, SampleRange)) or request.accuracy_data is not None,
            "tensors": [row.as_dict() for row in found.agreements],
        }
        if converted:
            progress.stage(f"comparing the network in {model.activations.type} with the original")
            with tempfile.TemporaryDirectory(prefix=".network-", dir=request.base.parent) as folder:
                network = Path(folder) / "network.onnx"
                write(model.ir_model, network)
                alone = compare(original, replace(Side.of(network), rounding=True), samples)
            accuracy["network"] = [row.as_dict() for row in alone.agreements]
    except BuilderError as error:
        # ONNX Runtime does not know all that TensorRT knows, its MoE layer for one.
        return {"not_measured": str(error)}
    return accuracy


def _build(
    request: Request,
    plan: Plan,
    model: Path,
    profiles: Sequence[Profiles],
    report: Report,
    progress: Progress,
) -> None:
    planned = bundle.planned_entries(plan, model)
    with report.timed("compile"):
        library, with_sources = _plugins(request, planned, report, progress)
    destination = request.bundle or request.output
    assert destination is not None
    with report.timed("build"), scratch(destination.parent) as temporary:
        folder = temporary / "bundle"
        folder.mkdir()
        bundle.write_folder(
            folder,
            request.target,
            model,
            planned,
            profiles,
            library,
            with_sources,
            timing_cache=request.timing_cache,
            keep=request.bundle is not None,
        )
        if request.bundle is not None:
            folder.rename(request.bundle)
            report.bundle = str(request.bundle)
            return
        _check_memory(model, report)
        # Messages name the user's files, not those of the folder, which are gone by then.
        names = {folder / "model.onnx": model, temporary / "out.engine": destination}
        if library is not None:
            names[folder / library.name] = library
        if request.timing_cache is not None:
            names[folder / "timing.cache"] = request.timing_cache
        result = engine.run_script(folder, temporary / "out.engine", forward(progress), names)
        os.replace(temporary / "out.engine", destination)
        if request.timing_cache is not None and (folder / "timing.cache").exists():
            with replacing(request.timing_cache) as copy:  # may be on another file system
                shutil.copyfile(folder / "timing.cache", copy)
    report.take_engine({**result, "engine": str(destination)})
    report.plugin_library_bytes = library.stat().st_size if library is not None else None
    if destination.stat().st_size != result["engine_bytes"]:
        raise BuilderError(VERIFICATION_FAILED, f"{destination}: not the size that was written")


def _plugins(
    request: Request, planned: list[dict[str, Any]], report: Report, progress: Progress
) -> tuple[Path | None, bool]:
    """The plugin library of the target, and whether its sources must travel because it cannot be built here."""
    if not any(entry["decision"] in PLUGINS for entry in planned):
        return None, False
    progress.stage(f"compiling the plugin library for {request.target.arch} (once; cached)")
    try:
        return build_library(request.target.arch, machine=request.target.host, progress=progress.step), False
    except ToolchainError as error:
        if request.bundle is None or request.target.host == platform.machine():
            raise
        report.warnings.append(
            f"the bundle carries the plugin library's sources, and the device compiles them with its nvcc: {error}"
        )
        return None, True


def _check_memory(model: Path, report: Report) -> None:
    estimate = engine.estimate_memory(model)
    if estimate.weights > estimate.available:
        raise BuilderError(
            BUILD_FAILED,
            f"the build needs about {decimal(estimate.needed)} of memory for {decimal(estimate.weights)} of weights, "
            f"and {decimal(estimate.available)} are free; free some, or add --bundle DIR and build on a larger machine",
        )
    if not estimate.fits:
        report.warnings.append(
            f"the build may need {decimal(estimate.needed)} of memory; {decimal(estimate.available)} are free"
        )


def forward(progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Show the build script's events as progress."""

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "stage":
            texts = {"parse": "TensorRT reads the model", "build": "TensorRT builds", "check": "checking the engine"}
            progress.stage(texts.get(event["stage"], event["stage"]))
        elif event["event"] == "step":
            progress.step(event["step"], event["steps"], event["phase"])

    return show


def _finish(request: Request, report: Report) -> Report:
    report.files["report"] = str(request.file(".report.json"))
    report.files["page"] = str(request.file(".report.html"))
    report.save(request.file(".report.json"))
    html_report.write(request.file(".report.json"))
    return report
