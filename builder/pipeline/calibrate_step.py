"""Activation statistics from the user's samples; the network's own type, which may depend on them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import replace

from trt_nvfp4.builder.accuracy.precision_search import Part
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.model.decoder_contract import DECODER, Decoder
from trt_nvfp4.builder.model.model import tokenizer_of
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.calibration.samples.filled_caches import with_filled_caches
from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, SampleRange, available, load_samples
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.statistics.collection import digest, observable
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.cache_names import state_names
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.mixed_precision.choose import choose, observed_tensors, slow_products
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.planning.planned import has_ranges
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, check_statistics
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_ranges
from trt_nvfp4.graph_passes.weights.published_fp8 import published_ranges

LARGEST_FLOAT16 = 65504

# So many samples are calibrated on before some are held out to measure accuracy with.
ENOUGH_SAMPLES = 4
# Texts, of which fewer are warned of.
FEW_TEXTS = 32


def calibrated_tensors(run: Run) -> bool | Collection[str]:
    """Whether there will be statistics of activations, or of which tensors the checkpoint has the ranges."""
    if run.request.calib_data is not None:
        return True
    ranges = published_ranges(run.subgraphs)
    if run.checkpoint is not None:
        ranges |= packed_ranges(run.checkpoint, run.subgraphs)
    return ranges.keys() or False


def convert_network(run: Run, given: Plan | None) -> SourceModel:
    """The graph in 16 bits, where it is in float32: as the given plan says, or else the options."""
    request, model = run.request, run.network
    if given is not None:
        return _with_cache_type(convert(model, given.activations))
    ranges: dict[str, float] = {}
    if request.activations == "fp16":
        ranges = _ranges(run)
    try:
        activations = choose(model, request.activations, request.keep_fp32, ranges)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if activations.note:
        run.report.warnings.append(f"the network stays float32, on slow kernels: {activations.note}")
    if (slow := slow_products(model, activations)) is not None:
        run.report.warnings.append(slow)
    return _with_cache_type(convert(model, activations))


def _with_cache_type(model: SourceModel) -> SourceModel:
    """`model`, whose metadata then say of which type its caches and states are: in a network of 16 bits most are."""
    properties = model.ir_model.metadata_props
    types = {value.name: value.dtype for value in model.graph.inputs}
    if model.activations.dtype is not None and DECODER in properties:
        decoder = Decoder.parse(properties[DECODER])
        name = {"bf16": "bfloat16", "fp16": "float16"}[model.activations.type]
        narrow = {cache for cache in decoder.caches if types.get(cache) == model.activations.dtype}
        states = [
            replace(state, dtype=name) if state_names(state.name)[0] in narrow else state for state in decoder.states
        ]
        of_caches = name if decoder.layers and decoder.caches[0] in narrow else decoder.cache_dtype
        properties[DECODER] = replace(decoder, cache_dtype=of_caches, states=states).json()
    return model


def _ranges(run: Run) -> dict[str, float]:
    """Largest magnitudes of the network's tensors on the calibration data."""
    if run.request.calib_data is None or is_statistics(run.request.calib_data):
        run.report.warnings.append(
            "--activations fp16 without input samples: values beyond 65504 become infinite, and the tensors that "
            "have them are unknown; add --calib-data FILE|DIR with samples, or choose bf16"
        )
        return {}
    run.progress.stage("looking for values beyond FP16's range")
    names = observable(run.model, observed_tensors(run.network))
    return dict(collect(run.model, dict.fromkeys(names, ()), samples_of(run), progress=run.progress.step).amax)


def check_samples(request: Request, specs: Mapping[str, InputSpec]) -> None:
    """Raise CalibrationError for input samples that the model does not take: all of them, but only the first of a
    Python loader, which may take its time."""
    if request.calib_data is None or is_statistics(request.calib_data):
        return
    tokenizer = tokenizer_of(request.model)
    for source in (request.calib_data, request.accuracy_data):
        if source is not None:
            samples = load_samples(source, specs, tokenizer, request.trust_remote_code, request.calib_samples)
            for _ in samples if isinstance(samples, Sized) else [next(iter(samples))]:
                pass


def check_data(run: Run) -> None:
    """Raise CalibrationError for statistics that would make the run fail: before the plan is written beside the engine
    and the rewritten model of an earlier run, which follow that run's plan."""
    data, plan, found = run.request.calib_data, run.plan, run.subgraphs
    if data is None:
        check_statistics(plan, None, found)
    elif is_statistics(data) and calibration_tensors(plan, found):
        check_statistics(plan, Statistics.load(data, run.model), found)


def calibrate(run: Run) -> Statistics | None:
    """Activation statistics from the user's samples, or from an earlier run's statistics file; None without data."""
    request, plan, found, report = run.request, run.plan, run.subgraphs, run.report
    if request.calib_data is None:
        unknown = [entry for entry in plan.subgraphs if not has_ranges(entry, run.calibrated)]
        if request.is_drafter or not any(entry.lowering.weights for entry in unknown):
            return None  # data would change nothing
        scaled = any(entry.lowering.scales_at_run_time for entry in unknown)
        consequence = "quantized activations are scaled at run time" if scaled else "activations are not quantized"
        report.warnings.append(f"no calibration data, so {consequence}; add --calib-data FILE|DIR with input samples")
        return None
    run.progress.stage("reading calibration data")
    budget = request.accuracy_budget is not None
    tensors = calibration_tensors(run.draft().with_all_statistics() if budget else plan, found)
    destination = request.file(".statistics.json")
    if not tensors:
        report.warnings.append(f"no decision of the plan uses activation statistics: {request.calib_data} is not read")
        if request.stop_after == "calibrate":  # from which the next command goes on
            Statistics({}, 0, model=digest(run.model)).save(destination)
            report.files["statistics"] = str(destination)
        return None
    if is_statistics(request.calib_data):
        return Statistics.load(request.calib_data, run.model)
    samples = samples_of(run)
    more = available(samples) > request.calib_samples
    drawn = (
        f" on {request.calib_samples} of {available(samples)} samples, evenly drawn (--calib-samples)" if more else ""
    )
    run.progress.stage(f"calibrating{drawn}")
    filled = with_filled_caches(samples)
    statistics = collect(run.model, tensors, filled, progress=run.progress.step, resume=destination)
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
    """Warnings about the samples from `source`, or about the model, by the statistics of `tensors`."""
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


def samples_of(run: Run, held_out: bool = False) -> Iterable[Sample]:
    """The samples to calibrate with, or those `held_out` to verify an accuracy budget, or measure accuracy, with."""
    request, specs, tokenizer = run.request, run.model.specs, run.model.tokenizer
    assert request.calib_data is not None
    own, most = held_out and request.accuracy_data is not None, request.calib_samples
    data = request.accuracy_data if own and request.accuracy_data is not None else request.calib_data
    samples = load_samples(data, specs, tokenizer, request.trust_remote_code, most)
    if own:
        return samples
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
