"""The subject of a benchmark: the request, and its model, plan and target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import attrs
import numpy as np
import onnx_ir as ir

from trt_nvfp4.builder.bench.bench_options import BenchOptions
from trt_nvfp4.builder.bench.timing import Device
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.model.decoder_contract import IDS, Decoder, decoder_of
from trt_nvfp4.builder.model.model_files import ENGINES
from trt_nvfp4.builder.model.onnx_file import is_rewritten, read, read_if_any
from trt_nvfp4.builder.targets import TARGETS, Target, find_target
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.calibration.recipes import DEFAULT
from trt_nvfp4.calibration.samples.samples import input_specs, load_samples
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kernels import note_kernels
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, DEFAULT_KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@attrs.frozen
class Request(BenchOptions):
    """A benchmark to run. `folder`: for temporary files, as large as the model; None: the system's own, maybe in
    memory."""

    folder: Path | None = None
    #: The model's weights that are not in its file, by name.
    weights: Mapping[str, ir.TensorProtocol] = attrs.field(factory=dict)


@dataclass(frozen=True)
class Subject:
    """The model behind what is benchmarked, its plan, target, and the engine if that was given; `shapes` of its inputs
    are the first sample's, those of --shapes, or an engine's opt shapes."""

    model: SourceModel
    found: Sequence[Subgraph]
    plan: Plan
    target: Target
    engine: Path | None
    shapes: Mapping[str, Shape]
    decoder: Decoder | None


def subject_of(request: Request, device: Callable[[], Device]) -> Subject:
    path = request.subject
    if not path.exists():
        raise ModelFaultError(f"{path}: no such file")
    if path.suffix in ENGINES:
        report = runtime.built_by(path)
        given = None if "exported model" in report.get("files", {}) else report.get("model")
        onnx = request.model or (Path(str(given)) if given else path.with_suffix(".onnx"))
        plan = request.plan or path.with_suffix(".plan.yaml")
        for option, file in (("--model", onnx), ("--plan", plan)):
            if not file.is_file():
                found = "is not a file" if file.exists() else "is not there"
                raise UsageError(
                    f"{path}: baselines are built from the original ONNX and the plan: add {option} ({file} {found})"
                )
        if is_rewritten(read_if_any(onnx)):
            raise UsageError(
                f"{path}: was built from {onnx}, which has been rewritten; add --model with the original ONNX"
            )
        return _planned(attrs.evolve(request, shapes=request.shapes or runtime.opt_shapes(path)), onnx, plan, path)
    if path.suffix != ".onnx":
        raise UsageError(f"{path}: expected an engine (.engine), an ONNX file or a Hugging Face directory")
    if request.model is not None:
        raise UsageError(f"--model {request.model}: {path} is the model itself, not an engine; leave that out")
    if is_rewritten(read_if_any(path)):
        raise UsageError(f"{path} has been rewritten already: give its engine, or the original ONNX and --plan")
    if request.plan is not None:
        return _planned(request, path, request.plan, None)
    model = load(path, None, request.weights)
    model = convert(model, choose(model, "auto"))
    target = target_of(request, device)
    decoder = decoder_of(read(path))
    subgraphs, shapes = find_subgraphs(model), _shapes(request, path)
    if decoder is not None and not shapes:
        shapes = {IDS: (1, 1)}  # the step that generates a token
    new = make_plan(
        model,
        subgraphs,
        target.capabilities,
        PlanOptions(
            kinds=DEFAULT_KINDS if decoder is None else ALL_KINDS,
            calibrated=request.calib_data is not None,
            recipe=DEFAULT,
            tokens=subgraph_tokens(model, subgraphs, shapes),
        ),
    )
    note_kernels(new.subgraphs, target.capabilities)
    return Subject(model, subgraphs, new, target, None, shapes, decoder)


def _planned(request: Request, onnx: Path, plan: Path, engine: Path | None) -> Subject:
    """Raises PlanError when the plan is not of this model, or not for this target."""
    loaded = Plan.load(plan)
    target = find_target(request.target or loaded.target)
    model = convert(load(onnx, None, request.weights), loaded.activations)
    found = find_subgraphs(model)
    loaded.check(model, target.capabilities, found)
    decoder = decoder_of(read(onnx))
    shapes = _shapes(request, onnx)
    if decoder is not None and not request.shapes:
        shapes = {IDS: (1, 1)}
    return Subject(model, found, loaded, target, engine, shapes, decoder)


def _shapes(request: Request, onnx: Path) -> Mapping[str, Shape]:
    sample = given_sample(request, onnx)
    return request.shapes if sample is None else {name: array.shape for name, array in sample.items()}


def given_sample(request: Request, onnx: Path) -> dict[str, np.ndarray] | None:
    """The first of the user's samples, unless --shapes asks for others."""
    data = request.calib_data
    if data is None or is_statistics(data):
        return None
    sample = next(iter(load_samples(data, input_specs(onnx), onnx.parent, request.trust_remote_code)))
    asked = request.shapes.items()
    return sample if all(name in sample and sample[name].shape == shape for name, shape in asked) else None


def target_of(request: Request, device: Callable[[], Device]) -> Target:
    """The given target, or this machine's. Raises UsageError without either."""
    return find_target(request.target or _local_target(device))


def _local_target(device: Callable[[], Device]) -> str:
    capability = driver.local_compute_capability()
    alike = [target for target in TARGETS.values() if target.compute_capability == capability]
    if not alike:
        raise UsageError("no target is given, and this machine has no GPU of a known target: add --target NAME")
    if len(alike) == 1:
        return alike[0].name
    gpu = device().environment()["gpu"]
    return next((target.name for target in alike if target.description in gpu), alike[0].name)
