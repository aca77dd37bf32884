"""Activation statistics from the user's samples; the network's own type, which may depend on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace

from trt_nvfp4.builder.accuracy.precision_search import Part, with_all_statistics
from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.export.decoder_contract import DECODER, Decoder
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.samples.filled_caches import with_filled_caches
from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, SampleRange, load_samples
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.statistics.collection import observable
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.mixed_precision.choose import choose, observed_tensors
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.planning.plan import Plan, has_ranges
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, check_statistics
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_ranges
from trt_nvfp4.graph_passes.weights.published_fp8 import published_ranges

LARGEST_FLOAT16 = 65504

# So many samples are calibrated on before some are held out to measure accuracy with.
ENOUGH_SAMPLES = 4
# Texts, of which fewer are warned of.
FEW_TEXTS = 32


def calibrated_tensors(
    request: Request, checkpoint: NVFP4Checkpoint | None, subgraphs: Sequence[Subgraph]
) -> bool | Collection[str]:
    """Whether there will be statistics of activations, or of which tensors the checkpoint has the ranges."""
    if request.calib_data is not None:
        return True
    ranges = published_ranges(subgraphs)
    if checkpoint is not None:
        ranges |= packed_ranges(checkpoint, subgraphs)
    return ranges.keys() or False


def convert_network(
    request: Request,
    model: SourceModel,
    given: Plan | None,
    specs: Mapping[str, InputSpec],
    report: Report,
    progress: Progress,
) -> SourceModel:
    """The model in 16 bits, where it is in float32: as the plan says that was handed in, or as it was asked for."""
    if given is not None:
        return _with_cache_type(convert(model, given.activations))
    ranges: dict[str, float] = {}
    if request.activations == "fp16":
        ranges = _ranges(request, model, specs, report, progress)
    try:
        activations = choose(model, request.activations, request.keep_fp32, ranges)
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error
    if activations.note:
        report.warnings.append(f"the network stays float32, on slow kernels: {activations.note}")
    return _with_cache_type(convert(model, activations))


def _with_cache_type(model: SourceModel) -> SourceModel:
    """`model`, whose metadata then say of which type its caches are: those of a network in 16 bits are, too."""
    properties = model.ir_model.metadata_props
    types = {value.name: value.dtype for value in model.graph.inputs}
    if model.activations.dtype is not None and DECODER in properties:
        decoder = Decoder.parse(properties[DECODER])
        if types.get(decoder.caches[0]) == model.activations.dtype:
            name = {"bf16": "bfloat16", "fp16": "float16"}[model.activations.type]
            properties[DECODER] = replace(decoder, cache_dtype=name).json()
    return model


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
    return dict(collect(model.path, dict.fromkeys(names, ()), samples_of(request, specs), progress=progress.step).amax)


def check_samples(request: Request, specs: Mapping[str, InputSpec]) -> None:
    """Raise CalibrationError for input samples that the model does not take: all of them, but the first alone of a
    Python loader, which may take its time."""
    if request.calib_data is None or is_statistics(request.calib_data):
        return
    tokenizer = request.model if request.model.is_dir() else request.model.parent
    for source in (request.calib_data, request.accuracy_data):
        if source is not None:
            samples = load_samples(source, specs, tokenizer, request.trust_remote_code)
            for _ in samples if isinstance(samples, Sized) else [next(iter(samples))]:
                pass


def check_data(request: Request, model: SourceModel, found: Sequence[Subgraph], plan: Plan) -> None:
    """Raise CalibrationError for statistics that the run would fail of: before the plan is written beside the engine
    and the rewritten model of an earlier run, which follow that run's plan."""
    if request.calib_data is None:
        check_statistics(plan, None, found)
    elif is_statistics(request.calib_data) and calibration_tensors(plan, found):
        check_statistics(plan, Statistics.load(request.calib_data, model.path), found)


def calibrate(
    request: Request,
    model: SourceModel,
    found: Sequence[Subgraph],
    specs: Mapping[str, InputSpec],
    plan: Plan,
    calibrated: bool | Collection[str],
    report: Report,
    progress: Progress,
) -> Statistics | None:
    """Activation statistics from the user's samples, or from an earlier run's statistics file; None without data."""
    if request.calib_data is None:
        unknown = [entry for entry in plan.subgraphs if not has_ranges(entry, calibrated)]
        if not any(entry.lowering.weights for entry in unknown):
            return None  # data would change nothing
        scaled = any(entry.lowering.scales_at_run_time for entry in unknown)
        consequence = "quantized activations are scaled at run time" if scaled else "activations are not quantized"
        report.warnings.append(f"no calibration data, so {consequence}; add --calib-data FILE|DIR with input samples")
        return None
    progress.stage("calibrating")
    budget = request.accuracy_budget is not None
    tensors = calibration_tensors(
        with_all_statistics(plan, model, found, request.target, request.kv_cache) if budget else plan, found
    )
    if not tensors:
        report.warnings.append(f"no decision of the plan uses activation statistics: {request.calib_data} is not read")
        return None
    if is_statistics(request.calib_data):
        return Statistics.load(request.calib_data, model.path)
    samples = samples_of(request, specs)
    destination = request.file(".statistics.json")
    filled = with_filled_caches(samples)
    statistics = collect(model.path, tensors, filled, progress=progress.step, resume=destination)
    statistics.save(destination)
    report.warnings += _doubts(plan, tensors, statistics, str(request.calib_data))
    if request.calib_data.suffix in TEXTS and isinstance(samples, Sized) and len(samples) < FEW_TEXTS:
        report.warnings.append(
            f"calibrated on {len(samples)} sample(s) of {request.calib_data}, which may not show the ranges of other "
            f"text: {FEW_TEXTS} or more are usual (one per paragraph, or per line where no line is blank)"
        )
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


def samples_of(request: Request, specs: Mapping[str, InputSpec], held_out: bool = False) -> Iterable[Sample]:
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
