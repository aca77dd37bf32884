"""What is benchmarked: a request, and the model, plan and target that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trt_nvfp4.builder.bench.timing import Device
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.export.decoder_contract import IDS, Decoder, decoder_of
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.inputs.shapes import Shape
from trt_nvfp4.builder.onnx_file import is_rewritten, read, read_if_any
from trt_nvfp4.builder.targets import TARGETS, Target, find_target
from trt_nvfp4.builder.tensorrt import backend
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
from trt_nvfp4.graph_passes.planning.plan import DEFAULT_KINDS, KINDS, Plan
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph


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
    #: Those of the model's weights that are not in its file, by name.
    weights: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)
    #: Of a decoder: cached tokens at which a step is timed; none: those of `lengths_of`.
    lengths: tuple[int, ...] = ()


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


def subject_of(request: Request, device: Callable[[], Device]) -> Subject:
    path = request.subject
    if not path.exists():
        raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file")
    if path.suffix in runtime.ENGINES:
        report = runtime.built_by(path)
        given = None if "exported model" in report.get("files", {}) else report.get("model")
        onnx = request.model or (Path(str(given)) if given else path.with_suffix(".onnx"))
        plan = request.plan or path.with_suffix(".plan.yaml")
        for option, file in (("--model", onnx), ("--plan", plan)):
            if not file.is_file():
                found = "is no file" if file.exists() else "is not there"
                raise BuilderError(
                    USAGE,
                    f"{path}: baselines are built from the original ONNX and the plan: add {option} ({file} {found})",
                )
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
    """The target asked for, or this machine's. Raises BuilderError (usage) without either."""
    return find_target(request.target or _local_target(device))


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
