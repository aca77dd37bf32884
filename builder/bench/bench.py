"""How fast a model is with NVFP4 plugins, against TensorRT FP8, TensorRT's own NVFP4 and BF16.

Three ways, by what is at hand, and the result says which: whole engines on their GPU; the plugins subgraph by subgraph
on any GPU; the roofline of the target, which is a prediction and no measurement.
"""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from trt_nvfp4.builder import roofline
from trt_nvfp4.builder.bench.decoders import Lengths, lengths_of, predict_steps, steps_table, time_steps
from trt_nvfp4.builder.bench.engines import bench_engines
from trt_nvfp4.builder.bench.subgraphs import bench_subgraphs
from trt_nvfp4.builder.bench.timing import CudaDevice, Device
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE, BuilderError
from trt_nvfp4.builder.export.decoder_contract import IDS, NEW_LENGTH, PAST_LENGTH, Decoder, decoder_of
from trt_nvfp4.builder.generate.open import prepared
from trt_nvfp4.builder.generate.tensorrt_runner import open_engine
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shapes import Shape
from trt_nvfp4.builder.onnx_file import is_rewritten, read, read_if_any
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.report.charts import number
from trt_nvfp4.builder.report.html import CONTESTANTS
from trt_nvfp4.builder.report.report import versions
from trt_nvfp4.builder.targets import TARGETS, Target, arch_of, find_target
from trt_nvfp4.builder.tensorrt import backend
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.builder.token_bytes import token_bytes
from trt_nvfp4.calibration.recipes import DEFAULT
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.calibration.samples.samples import input_specs, load_samples, save_sample
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.common.replacing import replacing, scratch
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.mixed_precision.choose import choose
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kernels import note_kernels, slow_kernels
from trt_nvfp4.graph_passes.planning.plan import DEFAULT_KINDS, KINDS, Plan
from trt_nvfp4.graph_passes.rewrite import original_weights_bytes, rewrite
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost

MODES = ("engine", "plugins", "roofline")
LABELS = {
    "engine": "measured: whole engines, CUDA graphs, interleaved",
    "plugins": "measured: the replaced subgraphs, one by one through the plugin host, against cuBLAS products of the "
    "same shapes (no activations or conversions between them)",
    "roofline": "predicted: the least time of the replaced subgraphs by the target's published peaks; nothing was run",
}
# Of a decoder, whose steps are what counts.
DECODER_LABELS = {
    "engine": "measured: engines over their caches, as generate runs them, in turns",
    "roofline": "predicted: the least time by the target's published peaks; nothing was run",
}
# Baselines, by what they are called in results. TensorRT's own NVFP4 is one of whole engines: as single products cuBLAS
# has it not, and by the roofline it is as fast as W4A4.
BASELINES = ("fp8", "bf16")
NATIVE = "native_nvfp4"


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `bench-engine --help`. `folder`: where temporary files, as large as the model, go;
    None: where the system has its own, maybe in memory."""

    subject: Path
    target: str | None = None
    plan: Path | None = None
    model: Path | None = None
    mode: str | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    calib_data: Path | None = None
    trust_remote_code: bool = False
    rounds: int = 50
    warm_up: int = 5
    folder: Path | None = None
    #: Of a decoder: cached tokens at which a step is timed; none: those of `lengths_of`.
    lengths: tuple[int, ...] = ()


@dataclass
class Result:
    """What came of it. `contestants` holds microseconds (p50, p90, p99, ...) of the whole; `subgraphs` of its parts.

    Of a decoder `steps` are microseconds of one sequence by contestant: of a prompt, and of a token behind so many that
    are cached. Its `contestants` are those of the longest.
    """

    mode: str
    model: str
    target: str
    label: str = ""
    contestants: dict[str, dict[str, float]] = field(default_factory=dict)
    subgraphs: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cosine_to_bf16: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class Subject:
    """The model behind what is benchmarked, its plan, target, and the engine if that was given; `shapes` of its inputs
    are the first sample's, those of --shapes, or an engine's typical ones."""

    model: SourceModel
    found: Sequence[Subgraph]
    plan: Plan
    target: Target
    engine: Path | None
    shapes: Mapping[str, Shape]
    decoder: Decoder | None


def bench(
    request: Request,
    progress: Progress,
    device: Callable[[], Device] = CudaDevice,
    open_host: Callable[[str], Any] = lambda arch: PluginHost(build_library(arch)),
) -> Result:
    """Carry out a request. `device` and `open_host` stand for this machine's GPU and plugin library.

    Raises BuilderError: usage, model when it is missing, or unavailable when the mode asked for cannot run here.
    """
    progress.stage("reading the model")
    data = request.calib_data
    if data is not None and not split_function(data)[0].exists():
        raise BuilderError(USAGE, f"--calib-data {data}: no such file or folder")
    with ExitStack() as made:
        if request.subject.is_dir():
            progress.stage(f"exporting {request.subject.name} to ONNX")
        exported = replace(request, subject=prepared(request.subject, made, "auto", 1))
        return _bench(exported, Result("", str(request.subject), ""), progress, device, open_host)


def _bench(
    request: Request,
    result: Result,
    progress: Progress,
    device: Callable[[], Device],
    open_host: Callable[[str], Any],
) -> Result:
    subject = _subject(request, device)
    mode, note = _mode(request, subject)
    decoder = subject.decoder
    lengths = None if decoder is None else lengths_of(decoder, request.lengths)
    if decoder is None and request.lengths:
        raise BuilderError(USAGE, f"--lengths: {request.subject} is no language model with caches; leave it out")
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
            result.notes.append("the decoder's parts alone; generate --runner torch runs all of it on this GPU")
    else:
        _bench_engines(request, subject, result, here, progress, lengths)
    result.environment = {"before": before, "after": here.environment(), "machine": platform.platform()}
    return result


def _subject(request: Request, device: Callable[[], Device]) -> Subject:
    path = request.subject
    if not path.exists():
        raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file")
    if path.suffix in runtime.ENGINES:
        report = runtime.built_by(path)
        files = report.get("files", {})
        onnx = request.model or Path(files.get("exported model") or report.get("model") or path.with_suffix(".onnx"))
        plan = request.plan or path.with_suffix(".plan.yaml")
        for option, file in (("--model", onnx), ("--plan", plan)):
            if not file.is_file():
                needed = "baselines are built from the original ONNX and the plan"
                raise BuilderError(USAGE, f"{path}: {needed}: add {option} ({file} is not there)")
        if is_rewritten(read_if_any(onnx)):
            raise BuilderError(
                USAGE, f"{path}: was built from {onnx}, which has been rewritten; add --model with the original ONNX"
            )
        return _planned(replace(request, shapes=request.shapes or runtime.typical_shapes(path)), onnx, plan, path)
    if path.suffix != ".onnx":
        raise BuilderError(USAGE, f"{path}: expected an engine (.engine), an ONNX file or a Hugging Face directory")
    if request.model is not None:
        raise BuilderError(USAGE, f"--model {request.model}: {path} is no engine but the model itself; leave that out")
    if is_rewritten(read_if_any(path)):
        raise BuilderError(
            USAGE, f"{path} has been rewritten already: give its engine, or the original ONNX and --plan"
        )
    if request.plan is not None:
        return _planned(request, path, request.plan, None)
    model = load(path)
    model = convert(model, choose(model, "auto"))
    target = find_target(request.target or _local_target(device))
    decoder = decoder_of(read(path))
    subgraphs, shapes = find_subgraphs(model), _shapes(request, path)
    if decoder is not None and not shapes:
        shapes = {IDS: (1, 1)}  # the step that generates a token
    new = make_plan(
        model,
        subgraphs,
        target.capabilities,
        kinds=DEFAULT_KINDS if decoder is None else KINDS,
        calibrated=request.calib_data is not None,
        recipe=DEFAULT,
        tokens=subgraph_tokens(model, subgraphs, shapes),
    )
    note_kernels(new.subgraphs, target.capabilities)
    return Subject(model, subgraphs, new, target, None, shapes, decoder)


def _planned(request: Request, onnx: Path, plan: Path, engine: Path | None) -> Subject:
    """Raises PlanError when the plan is not of this model, or not for this target."""
    loaded = Plan.load(plan)
    target = find_target(request.target or loaded.target)
    model = convert(load(onnx), loaded.activations)
    found = find_subgraphs(model)
    loaded.check(model, target.capabilities, found)
    decoder = decoder_of(read(onnx))
    shapes = _shapes(request, onnx)
    if decoder is not None and not request.shapes:
        shapes = {IDS: (1, 1)}
    return Subject(model, found, loaded, target, engine, shapes, decoder)


def _shapes(request: Request, onnx: Path) -> Mapping[str, Shape]:
    sample = _given_sample(request, onnx)
    return request.shapes if sample is None else {name: array.shape for name, array in sample.items()}


def _local_target(device: Callable[[], Device]) -> str:
    capability = backend.local_compute_capability()
    alike = [target for target in TARGETS.values() if target.compute_capability == capability]
    if not alike:
        raise BuilderError(
            USAGE, "nothing says for which GPU, and this machine has none that is known: add --target NAME"
        )
    if len(alike) == 1:
        return alike[0].name
    gpu = device().environment()["gpu"]
    return next((target.name for target in alike if target.description in gpu), alike[0].name)


def _mode(request: Request, subject: Subject) -> tuple[str, str]:
    """The best mode that can run here, or the one asked for; and why it is not a better one."""
    here = backend.local_compute_capability()
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
            raise BuilderError(
                UNAVAILABLE, f"--mode {request.mode} for {name} cannot run here: {reasons[request.mode]}"
            )
        return request.mode, ""
    mode = next(mode for mode in MODES if not reasons[mode])
    return mode, f"no whole engines: {no_engine}" if no_engine else ""


def _predict(subject: Subject, result: Result) -> None:
    """Sums over the subgraphs that the plan replaces; the rest of the model is the same for all contestants."""
    limits = roofline.LIMITS[subject.target.name]
    tokens = subgraph_tokens(subject.model, subject.plan.subgraphs, subject.shapes)
    result.subgraphs = roofline.predict(subject.plan, tokens, limits, subject.target.capabilities)
    result.notes += slow_kernels(note_kernels(subject.plan.subgraphs, subject.target.capabilities))
    if not result.subgraphs:
        raise BuilderError(
            USAGE,
            f"{subject.model.path}: the plan replaces no subgraph for {subject.target.name}: there is nothing to "
            f"predict ({_why_kept(subject.plan)})",
        )
    for name in ("nvfp4", *BASELINES):
        total = sum(entry["predicted_us"][name] for entry in result.subgraphs)
        result.contestants[name] = {"predicted_us": total}
    result.environment = {"gpu": limits.gpu, "bandwidth": limits.bandwidth, "tflops": dict(limits.tflops)}
    of = roofline.share(subject.plan, tokens, result.subgraphs, original_weights_bytes(subject.model.graph))
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
    here = backend.local_compute_capability()
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
        result.subgraphs = bench_subgraphs(
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
    if not result.subgraphs:
        raise BuilderError(
            USAGE,
            f"{subject.model.path}: the plan has no dense NVFP4 subgraph to time ({_why_kept(subject.plan)}); a --plan "
            "of build-engine --precision nvfp4 may have one",
        )
    result.notes += _left_out(subject.plan, result.subgraphs)
    for name in ("nvfp4", *BASELINES):
        if all(name in entry["timings"] for entry in result.subgraphs):
            result.contestants[name] = {
                key: sum(entry["timings"][name][key] * len(entry["names"]) for entry in result.subgraphs)
                for key in ("median_us", "p90_us", "p99_us")
            }


def _why_kept(plan: Plan) -> str:
    """The reason of one subgraph, an MoE block or MLP if there is any, as linears mostly were not asked for."""
    entry = min(plan.subgraphs, key=lambda entry: entry.kind == "linear", default=None)
    return f"{entry.kind} '{entry.name}' is {entry.decision}: {entry.reason}" if entry else "it names none"


def _left_out(plan: Plan, timed: list[dict[str, Any]]) -> list[str]:
    """What the sums over the timed subgraphs do not hold."""
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
        sample = _sample(request, subject, lengths)
        data = request.calib_data or save_sample(folder / "sample.npz", sample)
        builds, notes = _builds(request, subject, data, folder)
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


def _builds(
    request: Request, subject: Subject, data: Path, folder: Path
) -> tuple[dict[str, pipeline.Request], list[str]]:
    """How each contestant is built: the same model, target, shapes and data; and why one is not.

    The baselines have TensorRT's own layers for the subgraphs that the plan replaces, and no plugin.
    """
    model = subject.model
    ours = {entry.name for entry in subject.plan.subgraphs if entry.decision != Decision.KEEP}
    capabilities = replace(subject.target.capabilities, fp8_plugins=False)
    plans, notes = {"nvfp4": subject.plan}, []
    for name in (NATIVE, *BASELINES):
        precision = name.replace("_", "-")
        plan = make_plan(
            model,
            subject.found,
            capabilities,
            precision,
            KINDS,
            calibrated=True,
            recipe=subject.plan.recipe,
            attention="native",
        )
        replaced = [entry for entry in plan.subgraphs if entry.name in ours]
        if name == NATIVE and all(entry.decision != NATIVE for entry in replaced):
            why = replaced[0].reason if replaced else "the plan replaces nothing"
            notes.append(f"TensorRT's own NVFP4 is not built: {why}")
        else:
            plans[name] = replace(plan, subgraphs=replaced)
    builds = {}
    for name, plan in plans.items():
        plan.save(folder / f"{name}.plan.yaml")
        builds[name] = pipeline.Request(
            model.path,
            subject.target,
            folder / f"{name}.engine",
            plan=folder / f"{name}.plan.yaml",
            calib_data=data,
            trust_remote_code=request.trust_remote_code,
            typical=subject.shapes if subject.decoder is None else {},
            accuracy_samples=0,  # the engines themselves are compared
        )
    return builds, notes


def _sample(request: Request, subject: Subject, lengths: Lengths | None = None) -> dict[str, np.ndarray]:
    """One input: the user's, or a random one of the typical shapes; of a decoder a prompt, and empty caches."""
    path = subject.model.path
    if (given := _given_sample(request, path)) is not None:
        return given
    rng = np.random.default_rng(0)
    if subject.decoder is not None and lengths is not None:
        new = lengths.prompt
        caches = {name: spec for name, spec in input_specs(path).items() if name in subject.decoder.caches}
        sample = {name: np.zeros((1, *map(int, spec.shape[1:])), spec.dtype) for name, spec in caches.items()}
        sample[IDS] = rng.integers(0, subject.decoder.vocab_size, (1, new))
        return sample | {PAST_LENGTH: np.zeros(1, np.int64), NEW_LENGTH: np.full(1, new)}
    return random_samples(input_specs(path), vocabulary(path), 1, rng, subject.shapes)[0]


def _given_sample(request: Request, onnx: Path) -> dict[str, np.ndarray] | None:
    """The first of the user's samples, unless --shapes asks for others."""
    data = request.calib_data
    if data is None or is_statistics(data):
        return None
    sample = next(iter(load_samples(data, input_specs(onnx), onnx.parent, request.trust_remote_code)))
    asked = request.shapes.items()
    return sample if all(name in sample and sample[name].shape == shape for name, shape in asked) else None


def check_destination(path: Path) -> None:
    """Refuse, before the work, to write a result where it cannot be, or over something else.

    Raises BuilderError (usage).
    """
    if path.is_dir():
        raise BuilderError(USAGE, f"-o {path}: is a folder, and a file is to be written; name one in it")
    if path.exists() and not (path.is_file() and _is_result(path)):
        raise BuilderError(
            USAGE, f"-o {path}: is not a result of bench-engine, and would be written over; choose another -o"
        )


def _is_result(path: Path) -> bool:
    try:
        found = parse_json(path.read_text())
    except ValueError:
        return False
    return isinstance(found, dict) and {"mode", "contestants"} <= found.keys()


def tables(result: Result) -> list[Table]:
    """The result for the terminal."""
    if result.steps:
        return [steps_table(result.steps, f"{result.model} on {result.target}: {result.label}")]
    unit = "predicted us" if result.mode == "roofline" else "median us"
    whole = Table(title=f"{result.model}: {result.label}", title_justify="left")
    cosines = result.cosine_to_bf16  # of whole engines
    for heading in ("contestant", unit, "p90", "p99", "speed-up as planned", *(["cosine to BF16"] if cosines else [])):
        whole.add_column(heading, justify="left" if heading == "contestant" else "right")
    key = "predicted_us" if result.mode == "roofline" else "median_us"
    ours = result.contestants["nvfp4"][key]
    for name, times in result.contestants.items():
        tail = [number(times[percentile]) if percentile in times else "-" for percentile in ("p90_us", "p99_us")]
        speed_up = "-" if name == "nvfp4" else f"{times[key] / ours:.2f}x"
        cosine = [f"{cosines[name]:.5f}"] if cosines else []
        whole.add_row(CONTESTANTS[name], number(times[key]), *tail, speed_up, *cosine)
    parts = Table(title="subgraphs", title_justify="left")
    names = [name for name in result.contestants if result.subgraphs]
    for heading in ("subgraph", "tokens", "decision", *(CONTESTANTS[name] for name in names)):
        parts.add_column(heading, overflow="fold", justify="left" if heading in ("subgraph", "decision") else "right")
    for entry in result.subgraphs:
        times = entry.get("predicted_us") or {name: timing["median_us"] for name, timing in entry["timings"].items()}
        label = entry["names"][0] + (f" and {len(entry['names']) - 1} like it" if len(entry["names"]) > 1 else "")
        parts.add_row(label, str(entry["tokens"]), entry["decision"], *(number(times[name]) for name in names))
    return [whole, parts] if result.subgraphs else [whole]
