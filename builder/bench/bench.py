"""How fast a model is with NVFP4 plugins, against TensorRT FP8, TensorRT's own NVFP4 and BF16.

Three ways, by what is at hand, and the result says which: whole engines on their GPU; the plugins subgraph by subgraph
on any GPU; the roofline of the target, which is a prediction and no measurement.
"""

import importlib.util
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from trt_nvfp4.builder.bench.decoders import Lengths, lengths_of, predict_steps, time_steps
from trt_nvfp4.builder.bench.engines import bench_engines
from trt_nvfp4.builder.bench.original import with_original
from trt_nvfp4.builder.bench.ranks import bench_ranks
from trt_nvfp4.builder.bench.result import DECODER_LABELS, LABELS, MODES, Result, check_destination
from trt_nvfp4.builder.bench.subgraphs import TimedSubgraph, bench_subgraphs
from trt_nvfp4.builder.bench.subject import Request, Subject, subject_of
from trt_nvfp4.builder.bench.timing import CudaDevice, Device
from trt_nvfp4.builder.bench.variants import BASELINES, NATIVE, builds_of, sample_of
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import BuilderError, UnavailableError, UsageError
from trt_nvfp4.builder.generate.tensorrt_runner import open_engine
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.model.decoder_contract import Decoder
from trt_nvfp4.builder.parallel.manifest import FILE as RANKS
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html
from trt_nvfp4.builder.report.report import versions
from trt_nvfp4.builder.roofline import predict as roofline
from trt_nvfp4.builder.roofline.profile_times import products
from trt_nvfp4.builder.roofline.token_bytes import token_bytes
from trt_nvfp4.builder.targets import arch_of
from trt_nvfp4.builder.terminal.progress import Progress
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.calibration.samples.samples import save_sample
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.replacing import made_folder, scratch
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import original_weights_bytes, rewrite
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost


def bench(
    request: Request,
    progress: Progress,
    device: Callable[[], Device] = CudaDevice,
    open_host: Callable[[str], Any] = lambda arch: PluginHost(build_library(arch)),
) -> Result:
    """Carry out a request. `device` and `open_host` stand for this machine's GPU and plugin library.

    Raises BuilderError: usage, model when it is missing, or unavailable when the given mode cannot run here.
    """
    progress.stage("reading the model")
    data = request.calib_data
    if data is not None and not split_function(data)[0].exists():
        raise UsageError(f"--calib-data {data}: no such file or folder")
    if (request.subject / RANKS).is_file():
        return bench_ranks(request, progress, device)
    with ExitStack() as made:
        exported = with_original(request, made, progress, device)
        return _bench(exported, Result("", str(request.subject), ""), progress, device, open_host)


def bench_to_file(request: Request, progress: Progress) -> Result:
    """As `bench`; the result is written to its `output`, and shown on the page of the build whose name it has.

    Raises UsageError, before the work, too for one that it cannot or must not write.
    """
    output = request.output
    if output is None:
        return bench(request, progress)
    check_destination(output)
    with made_folder(output.parent):
        result = bench(attrs.evolve(request, folder=output.parent), progress)
        result.save(output)
    report = output.with_name(output.name.removesuffix(".bench.json") + ".report.json")
    try:
        if report.is_file():
            html.write(report)
    except BuilderError as error:
        result.notes.append(f"the report's page cannot show this: {error}")
    return result


def _bench(
    request: Request,
    result: Result,
    progress: Progress,
    device: Callable[[], Device],
    open_host: Callable[[str], Any],
) -> Result:
    subject = subject_of(request, device)
    mode, note = _mode(request, subject)
    decoder = subject.decoder
    lengths = None if decoder is None else lengths_of(decoder, request.lengths, request.accepted)
    if decoder is None and (request.lengths or request.accepted is not None):
        given = "--lengths" if request.lengths else "--accepted"
        raise UsageError(f"{given}: {request.subject} is not a language model with caches; leave it out")
    result.mode, result.target, result.versions = mode, subject.target.name, versions()
    result.label = LABELS[mode] if decoder is None else DECODER_LABELS.get(mode, LABELS[mode])
    if note:
        result.notes.append(note)
    if mode == "roofline":
        _predict(subject, result)
        if decoder is not None and lengths is not None:
            _predict_decoder(subject, decoder, lengths, result)
        return result
    here = device()
    before = here.environment()
    if mode == "plugins":
        _bench_plugins(request, subject, result, here, open_host, progress)
        if decoder is not None:
            result.notes.append(
                "only the decoder's parts were timed; generate --runner torch runs all of it on this GPU"
            )
    else:
        _bench_engines(request, subject, result, here, progress, lengths)
    result.environment = {"before": before, "after": here.environment(), "machine": platform.platform()}
    return result


def _mode(request: Request, subject: Subject) -> tuple[str, str]:
    """The given mode, or the best that can run here and why it is not a better one."""
    here = driver.local_compute_capability()
    installed = [module for module in subject.target.modules if importlib.util.find_spec(module) is not None]
    name = subject.target.name
    if here is None:
        no_engine = no_plugins = "this machine has no NVIDIA GPU"
    else:
        no_plugins = ""
        gpu = f"this machine's GPU has compute capability {here[0]}.{here[1]}"
        wanted = subject.target.compute_capability
        no_engine = f"{gpu}, {name} has {wanted[0]}.{wanted[1]}" if here != wanted else ""
        if not no_engine and not installed:
            no_engine = f"{' or '.join(subject.target.modules)} is not installed"
    reasons = {"engine": no_engine, "plugins": no_plugins, "roofline": ""}
    if request.mode is not None:
        if reasons[request.mode]:
            raise UnavailableError(f"--mode {request.mode} for {name} cannot run here: {reasons[request.mode]}")
        return request.mode, ""
    mode = next(mode for mode in MODES if not reasons[mode])
    return mode, f"no whole engines: {no_engine}" if no_engine else ""


def _predict(subject: Subject, result: Result) -> None:
    """Sums over the products that the plan replaces; the rest of the model, attention too, is the same for all
    contestants."""
    limits = roofline.LIMITS[subject.target.name]
    tokens = subgraph_tokens(subject.model, subject.plan.subgraphs, subject.shapes)
    predicted = roofline.predict(subject.plan, tokens, limits, subject.target.capabilities)
    result.subgraphs = predicted
    result.notes += slow_kernels(note_kernels(subject.plan.subgraphs, subject.target.capabilities))
    if not predicted:
        raise UsageError(
            f"{subject.model.path}: the plan replaces no subgraph for {subject.target.name}: there is nothing to "
            f"predict ({_why_kept(subject.plan)})"
        )
    for name in ("nvfp4", *BASELINES):
        total = sum(entry["predicted_us"][name] for entry in products(predicted) or predicted)
        result.contestants[name] = {"predicted_us": total}
    result.environment = {"gpu": limits.gpu, "bandwidth": limits.bandwidth, "tflops": dict(limits.tflops)}
    of = roofline.share(subject.plan, tokens, predicted, original_weights_bytes(subject.model.graph))
    result.notes.append(f"of {of}")
    result.notes.append(f"peaks: {limits.source}")


def _predict_decoder(subject: Subject, decoder: Decoder, lengths: Lengths, result: Result) -> None:
    limits = roofline.LIMITS[subject.target.name]
    read_once = token_bytes(subject.model, subject.plan, decoder, limits)
    result.steps = predict_steps(subject.plan, decoder, read_once, limits, lengths)
    result.contestants = {name: {"predicted_us": us} for name, us in result.steps[-1]["us"].items()}


def _bench_plugins(
    request: Request,
    subject: Subject,
    result: Result,
    device: Device,
    open_host: Callable[[str], Any],
    progress: Progress,
) -> None:
    here = driver.local_compute_capability()
    assert here is not None
    arch = arch_of(here)
    progress.stage(f"compiling the plugin library for {arch} (once; cached)")
    host = open_host(arch)
    progress.stage("quantizing weights")
    tokens = subgraph_tokens(subject.model, subject.plan.subgraphs, subject.shapes)
    with scratch(request.folder) as folder:
        destination = folder / "m.rewritten.onnx"
        rewritten = rewrite(subject.model, subject.plan, _statistics(request), destination, progress.step)
        progress.stage("timing subgraphs")
        result.subgraphs = timed = bench_subgraphs(
            device,
            host,
            rewritten.path,
            subject.plan,
            tokens,
            int(device.environment()["l2_bytes"]),
            request.rounds,
            request.warm_up,
            progress.step,
        )
    if not timed:
        raise UsageError(
            f"{subject.model.path}: the plan has no dense NVFP4 subgraph to time ({_why_kept(subject.plan)}); a --plan "
            "of build-engine --precision nvfp4 may have one"
        )
    result.notes += _left_out(subject.plan, timed)
    for name in ("nvfp4", *BASELINES):
        if all(name in entry["timings"] for entry in timed):
            result.contestants[name] = {
                key: sum(entry["timings"][name][key] * len(entry["names"]) for entry in timed)
                for key in ("median_us", "p90_us", "p99_us")
            }


def _why_kept(plan: Plan) -> str:
    """The reason of one subgraph, an MoE block or MLP if there is any: linears are mostly not selected."""
    entry = min(plan.subgraphs, key=lambda entry: kind_of(entry).selection != "default", default=None)
    return f"{entry.kind} '{entry.name}' is {entry.decision}: {entry.reason}" if entry else "it names none"


def _left_out(plan: Plan, timed: Sequence[TimedSubgraph]) -> list[str]:
    """Subgraphs and baselines that are missing in the sums."""
    names = {name for entry in timed for name in entry["names"]}
    untimed = [entry.name for entry in plan.subgraphs if entry.decision != Decision.KEEP and entry.name not in names]
    notes = [f"not timed, as only dense NVFP4 subgraphs are: {', '.join(untimed)}"] if untimed else []
    missing = {(name, reason): entry["names"][0] for entry in timed for name, reason in entry["missing"].items()}
    return notes + [f"no {name} baseline of {subgraph}: {reason}" for (name, reason), subgraph in missing.items()]


def _statistics(request: Request) -> Statistics | None:
    if request.calib_data is None or not is_statistics(request.calib_data):
        return None
    return Statistics.load(request.calib_data)


def _bench_engines(
    request: Request,
    subject: Subject,
    result: Result,
    device: Device,
    progress: Progress,
    lengths: Lengths | None,
) -> None:
    with scratch(request.folder) as folder:
        engines: dict[str, Path] = {"nvfp4": subject.engine} if subject.engine is not None else {}
        sample = sample_of(request, subject, lengths)
        data = request.calib_data or save_sample(folder / "sample.npz", sample)
        builds, notes = builds_of(request, subject, data, folder)
        result.notes += notes
        for contestant, build in builds.items():
            if contestant in engines:
                continue
            progress.stage(f"building the {contestant} engine")
            try:
                pipeline.run(build, progress)
                engines[contestant] = folder / f"{contestant}.engine"
            except (BuilderError, CalibrationError) as error:
                if contestant != NATIVE:
                    raise
                result.notes.append(f"TensorRT's own NVFP4 is not realized: {error}")
        progress.stage("timing engines")
        if lengths is not None:
            _time_decoders(request, engines, lengths, result)
            return
        result.contestants, result.layers, result.cosine_to_bf16 = bench_engines(
            device,
            engines,
            sample,
            request.rounds,
            request.warm_up,
            progress.step,
        )


def _time_decoders(request: Request, engines: Mapping[str, Path], lengths: Lengths, result: Result) -> None:
    with ExitStack() as opened:
        runners = {}
        for name, engine in engines.items():
            runners[name] = open_engine(engine)
            opened.callback(runners[name].close)
        result.steps = time_steps(runners, lengths, request.rounds, request.warm_up)
    result.contestants = {name: {"median_us": us} for name, us in result.steps[-1]["us"].items()}
