"""What the user asks of the pipeline, and what is wrong with it as far as that shows before any work."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import onnx

from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.plan import DEFAULT_KINDS, selection

from .accuracy_budget import Budget
from .errors import MODEL_AT_FAULT, USAGE, BuilderError
from .origin import is_exported
from .shapes import Shape
from .sides import ENGINES
from .targets import Target


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `build-engine --help`."""

    model: Path
    target: Target
    output: Path | None = None
    precision: str = "auto"
    plan: Path | None = None
    stop_after: str | None = None
    calib_data: Path | None = None
    recipe: str | None = None
    least: Mapping[str, Shape] = field(default_factory=dict)
    typical: Mapping[str, Shape] = field(default_factory=dict)
    most: Mapping[str, Shape] = field(default_factory=dict)
    include: str | None = None
    exclude: str | None = None
    kinds: tuple[str, ...] = DEFAULT_KINDS
    moe: str = "plugin"
    packed_weights: Path | None = None
    require: str | None = None
    bundle: Path | None = None
    timing_cache: Path | None = None
    accuracy_budget: Budget | None = None
    accuracy_data: Path | None = None
    accuracy_samples: int = 2

    @property
    def base(self) -> Path:
        """Every file of a run is called this and a suffix."""
        if self.output is not None:
            # Names hold dots of their own: Qwen2.5-7B.
            return self.output.with_suffix("") if self.output.suffix in ENGINES else self.output
        if self.bundle is not None:
            return self.bundle
        raise BuilderError(USAGE, "nothing says where to write: add -o OUT.engine or --bundle DIR")

    def file(self, suffix: str) -> Path:
        return self.base.with_name(self.base.name + suffix)


def check(request: Request, rewritten: bool) -> None:
    """Refuse what cannot succeed, what would pass unheard, and what would destroy a file; `rewritten`: the model is
    one that `--stop-after rewrite` left.

    Raises BuilderError, CalibrationError (a recipe that is none), or OSError (the folder cannot be written to).
    """
    _check_budget(request)
    _check_unheard(request, rewritten)
    _check_selection(request)
    _check_recipe(request)
    _check_inputs(request)
    _check_destination(request, rewritten)


def _check_budget(request: Request) -> None:
    if request.accuracy_budget is None:
        if request.accuracy_data is not None:
            raise BuilderError(USAGE, "--accuracy-data is what --accuracy-budget is verified with: add one")
        return
    if request.precision == "native-nvfp4":
        raise BuilderError(
            USAGE, "--accuracy-budget measures with ONNX Runtime, which has no FP4: leave out --precision native-nvfp4"
        )
    if request.plan is not None:
        raise BuilderError(USAGE, "--plan and --accuracy-budget both decide on precisions; leave one out")
    if request.calib_data is None or request.calib_data.name.endswith(".statistics.json"):
        raise BuilderError(USAGE, "--accuracy-budget needs input samples to measure with: add --calib-data FILE|DIR")


def _check_unheard(request: Request, rewritten: bool) -> None:
    """Options about what a plan has decided, or a rewrite has done."""
    if request.plan is None:
        return
    unheard = ["precision", "moe"]
    if request.require is None:  # which asks something of the subgraphs that these select
        unheard += ["kinds", "include", "exclude"]
    if rewritten:
        unheard += ["recipe", "packed_weights", "stop_after", "accuracy_samples"]
    defaults = {option.name: option.default for option in fields(request)}
    given = [f"--{name.replace('_', '-')}" for name in unheard if getattr(request, name) != defaults[name]]
    if given:
        done = f"{request.model} has been rewritten" if rewritten else f"{request.plan} has decided"
        raise BuilderError(USAGE, f"{done} already, so that {', '.join(given)} would have no effect; leave that out")


def _check_selection(request: Request) -> None:
    try:
        selection(request.kinds, request.include, request.exclude)
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error


def _check_recipe(request: Request) -> None:
    needs = parse(request.recipe).needs if request.recipe is not None else frozenset()
    if needs and request.calib_data is None:
        raise BuilderError(
            USAGE,
            f"recipe '{request.recipe}' needs {', '.join(sorted(needs))} of the activations: give input samples with "
            "--calib-data, or choose a recipe that needs none, such as mse",
        )


def _check_inputs(request: Request) -> None:
    if not request.model.exists():
        raise BuilderError(MODEL_AT_FAULT, f"{request.model}: no such file or folder")
    for option in ("plan", "calib_data", "accuracy_data", "packed_weights"):
        path: Path | None = getattr(request, option)
        if path is not None and not _without_function(path).exists():
            raise BuilderError(USAGE, f"--{option.replace('_', '-')} {path}: no such file or folder")


def _without_function(path: Path) -> Path:
    """The file of a Python loader, `loader.py:function`; any other path as it is."""
    return Path(str(path).rpartition(":")[0]) if ".py:" in str(path) else path


def _check_destination(request: Request, rewritten: bool) -> None:
    files = [file for file in (request.output, request.timing_cache) if file is not None]
    for file in files:
        if file.is_dir():
            raise BuilderError(USAGE, f"{file}: is a folder, and a file is to be written; name one in it")
        if file.exists() and not file.is_file():
            raise BuilderError(USAGE, f"{file}: is a device or a pipe, which a file would replace; name a file")
    if request.output is not None and request.output.suffix == ".onnx":
        raise BuilderError(USAGE, f"-o {request.output}: names the engine, not an ONNX file; expected OUT.engine")
    if not rewritten:
        files += [request.file(".rewritten.onnx"), request.file(".rewritten.onnx.data")]
    if existing := [file for file in files if file.exists()]:
        inputs = [file for file in _inputs(request) if file.exists()]
        for file in existing:
            if any(file.samefile(read) for read in inputs):
                raise BuilderError(USAGE, f"{file}: would be written over, and this run reads it; choose another -o")
    exported = request.file(".onnx")
    if request.model.is_dir() and exported.exists() and not is_exported(exported):
        raise BuilderError(
            USAGE, f"{exported}: is not the export of an earlier run, and would be written over; choose another -o"
        )
    folder = request.base.parent
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if request.bundle is not None and request.bundle.exists():
        raise BuilderError(USAGE, f"{request.bundle}: exists already; choose a new folder or remove this one")


def _inputs(request: Request) -> Iterator[Path]:
    """What the run reads, external data of the model included."""
    for path in (request.model, request.plan, request.calib_data, request.accuracy_data, request.packed_weights):
        if path is not None:
            yield _without_function(path)
    if request.model.is_dir():
        return
    try:
        model = onnx.load(request.model, load_external_data=False)
    except Exception:  # protobuf's own error types; whoever reads the model reports them
        return
    for tensor in onnx.external_data_helper._get_all_tensors(model):
        yield from (request.model.parent / entry.value for entry in tensor.external_data if entry.key == "location")
