"""What the user asks of the pipeline, and what is wrong with it as far as that shows before any work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import onnx

from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.inputs.shapes import LARGEST_DIMENSION, Shape
from trt_nvfp4.builder.model_files import check_model_file
from trt_nvfp4.builder.onnx_file import is_exported, read_if_any
from trt_nvfp4.builder.targets import Target
from trt_nvfp4.builder.tensorrt.backend import FEATURES
from trt_nvfp4.builder.tensorrt.build_script import choose_module
from trt_nvfp4.builder.tensorrt.load import ENGINES
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.samples.text import open_text
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.external_data import external_files
from trt_nvfp4.graph_passes.planning.decide import selection
from trt_nvfp4.graph_passes.planning.decoder import KIND as DECODER
from trt_nvfp4.graph_passes.planning.plan import DEFAULT_KINDS, Plan

#: Types of ONNX tensors that no version of TensorRT has.
UNKNOWN_TO_TENSORRT = {
    onnx.TensorProto.INT16,
    onnx.TensorProto.UINT16,
    onnx.TensorProto.UINT32,
    onnx.TensorProto.UINT64,
    onnx.TensorProto.STRING,
    onnx.TensorProto.COMPLEX64,
    onnx.TensorProto.COMPLEX128,
}
#: What files of models are called that --surgery has changed.
SURGERY = ".surgery.onnx"
# Samples, and what models and checkpoints of Hugging Face consist of; an engine of an earlier run may lie among them.
READ_IN_FOLDERS = {
    ".npz",
    ".npy",
    ".json",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".model",
    ".txt",
    ".jsonl",
    ".jinja",
    ".py",
}


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `build-engine --help`."""

    model: Path
    target: Target
    output: Path | None = None
    precision: str = "auto"
    activations: str = "auto"
    keep_fp32: str | None = None
    plan: Path | None = None
    stop_after: str | None = None
    calib_data: Path | None = None
    recipe: str | None = None
    least: Mapping[str, Shape] = field(default_factory=dict)
    typical: Mapping[str, Shape] = field(default_factory=dict)
    most: Mapping[str, Shape] = field(default_factory=dict)
    include: str | None = None
    exclude: str | None = None
    #: None: those of the task, `DEFAULT_KINDS, and linears too in a model with caches`.
    kinds: tuple[str, ...] | None = None
    moe: str = "plugin"
    #: Of `planning.attention.ATTENTIONS` and KV_CACHES.
    attention: str = "auto"
    kv_cache: str = "auto"
    packed_weights: Path | None = None
    require: str | None = None
    require_fast: bool = False
    bundle: Path | None = None
    timing_cache: Path | None = None
    #: Whether the engine carries the plugin library; otherwise it lies beside the engine.
    embed_plugins: bool = True
    #: Whether the engine leaves the plugins' weights in a file beside it.
    strip: bool = False
    #: Whether TensorRT may keep its own layers' weights in host memory.
    weight_streaming: bool = False
    accuracy_budget: Budget | None = None
    accuracy_data: Path | None = None
    accuracy_samples: int = 2
    task: str = "auto"
    #: keep: an ONNX model's caches stay as they are; inplace: they become caches of fixed capacity.
    cache: str = "keep"
    cache_capacity: int | None = None
    max_batch: int | None = None
    all_logits: bool = False
    trust_remote_code: bool = False
    #: A Python file and function (script.py:function) that changes the graph before anything is looked for.
    surgery: Path | None = None
    #: Where the graph after each pass is written.
    dump_passes: Path | None = None
    #: Merged into the model of a Hugging Face directory before anything else.
    adapter: Adapter | None = None
    #: HEIGHTxWIDTH of the images that a vision encoder is built for.
    image_size: str | None = None
    #: One graph of a model of several, which may have nothing to replace.
    is_part: bool = False

    @property
    def base(self) -> Path:
        """Every file of a run is called this and a suffix."""
        if self.output is not None:
            # Names hold dots of their own: Qwen2.5-7B.
            return self.output.with_suffix("") if self.output.suffix in ENGINES else self.output
        if self.bundle is not None:
            return self.bundle
        raise BuilderError(USAGE, "nothing says where to write: add -o OUT.engine or --bundle DIR")

    @property
    def runs_model(self) -> bool:
        """Whether something runs the exported model, or changes it as a file."""
        return self.calib_data is not None or self.surgery is not None

    def file(self, suffix: str) -> Path:
        return self.base.with_name(self.base.name + suffix)


def check(request: Request, rewritten: bool) -> None:
    """Refuse what cannot succeed, what would pass unheard, and what would destroy a file; `rewritten`: the model is
    one that `--stop-after rewrite` left.

    Raises BuilderError, CalibrationError (a recipe that is none) or PlanError.
    """
    _check_names(request)
    _check_caches(request)
    _check_budget(request)
    _check_unheard(request, rewritten)
    _check_calibration(request)
    _check_selection(request)
    _check_recipe(request)
    _check_layers(request)
    _check_adapter(request)
    _check_inputs(request)
    _check_recipe_is_heard(request)
    check_streaming(request)
    _check_interface(request)
    check_texts(request)
    _check_destination(request, rewritten)


def _check_names(request: Request) -> None:
    """ONNX and TensorRT take names of files in UTF-8."""
    for path in (request.model, request.base, request.timing_cache):
        if path is None:
            continue
        name = str(path.absolute())
        try:
            meant = os.fsencode(name).decode()
        except UnicodeDecodeError as error:
            shown = name.encode(errors="backslashreplace").decode()
            raise BuilderError(
                USAGE, f"{shown}: is no name in UTF-8, which ONNX and TensorRT need; rename the file or the folder"
            ) from error
        if meant != name:
            raise BuilderError(
                USAGE,
                f"{meant}: is a name in UTF-8, which Python takes for {sys.getfilesystemencoding()} in this locale; "
                "set PYTHONUTF8=1, or a locale of UTF-8, such as LC_ALL=C.UTF-8",
            )


def _check_caches(request: Request) -> None:
    """Sizes of caches, and that a model is exported for which they are given."""
    sizes = {"--cache-capacity": request.cache_capacity, "--max-batch": request.max_batch}
    for flag, size in sizes.items():
        if size is not None and not 1 <= size <= LARGEST_DIMENSION:
            raise BuilderError(USAGE, f"{flag} {size}: expected 1 to {LARGEST_DIMENSION}")
    given = [flag for flag, size in sizes.items() if size is not None] + ["--all-logits"] * request.all_logits
    if given and request.task == "features":
        raise BuilderError(USAGE, f"{', '.join(given)}: --task features exports no caches; leave one out")
    if request.cache == "inplace":
        if request.model.is_dir() or request.all_logits:
            what = (
                "a Hugging Face directory is exported so anyway"
                if request.model.is_dir()
                else "--all-logits has no effect"
            )
            raise BuilderError(USAGE, f"{request.model}: --cache inplace is for ONNX models: {what}; leave it out")
        return
    if not request.model.is_dir() and (request.task != "auto" or given):
        options = ", ".join(given if request.task == "auto" else [f"--task {request.task}", *given])
        raise BuilderError(
            USAGE,
            f"{request.model}: is not exported, so that {options} would have no effect; leave that out",
        )


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
    if request.calib_data is None or is_statistics(request.calib_data):
        raise BuilderError(USAGE, "--accuracy-budget needs input samples to measure with: add --calib-data FILE|DIR")


#: Options of one graph's run that a model of parts, or of ranks, has no use for.
OF_ONE_GRAPH = ("surgery", "plan", "packed_weights", "accuracy_budget", "accuracy_data", "stop_after")
#: What a plan has decided.
PLANNED = ("precision", "moe", "attention", "kv_cache", "activations", "keep_fp32")
#: Of which subgraphs; --require asks something of those.
SELECTED = ("kinds", "include", "exclude")


def planned(request: Request, plan: Path) -> Request:
    """`request` as it is carried out once `plan` has decided."""
    decided = (*PLANNED, *(() if request.require is not None else SELECTED), "recipe")
    defaults: dict[str, Any] = {option.name: option.default for option in fields(request) if option.name in decided}
    return replace(request, plan=plan, **defaults)


def _check_unheard(request: Request, rewritten: bool) -> None:
    """Options about what a plan has decided, or a rewrite has done."""
    if request.plan is None:
        return
    unheard = [*PLANNED]
    if request.require is None:
        unheard += SELECTED
    if rewritten:
        unheard += [
            "calib_data",
            "recipe",
            "packed_weights",
            "stop_after",
            "accuracy_samples",
            "surgery",
            "dump_passes",
        ]
    defaults = {option.name: option.default for option in fields(request)}
    given = [f"--{name.replace('_', '-')}" for name in unheard if getattr(request, name) != defaults[name]]
    if given:
        done = f"{request.model} has been rewritten" if rewritten else f"{request.plan} has decided"
        raise BuilderError(USAGE, f"{done} already, so that {', '.join(given)} would have no effect; leave that out")


def _check_calibration(request: Request) -> None:
    if request.stop_after == "calibrate" and (request.calib_data is None or is_statistics(request.calib_data)):
        raise BuilderError(
            USAGE, "--stop-after calibrate: nothing would be calibrated; give input samples with --calib-data FILE|DIR"
        )


def check_streaming(request: Request) -> None:
    """That what builds the engine on this machine, if something does, can stream its weights."""
    target = request.target
    if not request.weight_streaming or request.output is None or request.bundle is not None or request.stop_after:
        return
    module = choose_module(target.modules, target.compute_capability)
    if target.why_not_here() is None and module not in FEATURES["weight_streaming"]:
        raise BuilderError(
            USAGE,
            f"--weight-streaming: {module} builds engines for {target.name} here, and only tensorrt streams weights; "
            "leave it out",
        )


def _check_selection(request: Request) -> None:
    if request.require_fast and request.require is None:
        raise BuilderError(USAGE, "--require-fast is about the subgraphs that --require names: add --require nvfp4")
    if request.keep_fp32 is not None and request.activations == "keep":
        raise BuilderError(
            USAGE, f"--activations keep leaves everything as it is: leave it or --keep-fp32 {request.keep_fp32} out"
        )
    try:
        selection(DEFAULT_KINDS if request.kinds is None else request.kinds, request.include, request.exclude)
    except ValueError as error:
        raise BuilderError(USAGE, str(error)) from error


def _check_layers(request: Request) -> None:
    if request.is_part and DECODER in (request.kinds or ()):
        raise BuilderError(
            USAGE, f"--kinds {DECODER}: layers of a model of several parts stay apart; leave {DECODER} out"
        )


def _check_adapter(request: Request) -> None:
    if request.adapter is None:
        return
    if not request.model.is_dir():
        raise BuilderError(
            USAGE,
            f"--adapter {request.adapter.directory}: {request.model} is no Hugging Face directory, into whose model an "
            "adapter is merged; give that of the model it was trained on",
        )
    if request.packed_weights is not None:
        raise BuilderError(
            USAGE,
            "--packed-weights are those of a model without --adapter; leave one of them out, or merge both before",
        )


def _check_recipe(request: Request) -> None:
    if request.packed_weights is not None and request.recipe is not None and parse(request.recipe).awq:
        raise BuilderError(
            USAGE,
            f"recipe '{request.recipe}' scales channels of weights, and --packed-weights takes them as they are; leave "
            "awq or --packed-weights out",
        )
    needs = parse(request.recipe).needs if request.recipe is not None else frozenset()
    if needs and request.calib_data is None:
        raise BuilderError(
            USAGE,
            f"recipe '{request.recipe}' needs {', '.join(sorted(needs))} of the activations: give input samples with "
            "--calib-data, or choose a recipe that needs none, such as mse",
        )


def _check_inputs(request: Request) -> None:
    check_model_file(request.model)
    if not request.model.is_file() and not request.model.is_dir():
        raise BuilderError(
            MODEL_AT_FAULT, f"{request.model}: is a pipe or a device, and a model is read several times; give a file"
        )
    for option in ("plan", "calib_data", "accuracy_data", "packed_weights", "surgery"):
        path: Path | None = getattr(request, option)
        if path is not None and not split_function(path)[0].exists():
            raise BuilderError(USAGE, f"--{option.replace('_', '-')} {path}: no such file or folder")


def check_texts(request: Request) -> None:
    """What is wrong with calibration text, or the tokenizer for it, before an export."""
    for file in (request.calib_data, request.accuracy_data):
        if file is not None and file.suffix in TEXTS and request.model.is_dir():
            open_text(file, request.model, request.trust_remote_code)


def _check_recipe_is_heard(request: Request) -> None:
    """Raises PlanError for a plan that is none."""
    if request.recipe is None:
        return
    if request.plan is not None:
        without = all(entry.lowering.weights != "nvfp4" for entry in Plan.load(request.plan).subgraphs)
        why = f"{request.plan} has no NVFP4 subgraph"
    else:
        without = request.precision in ("fp8", "bf16")
        why = f"--precision {request.precision} has no NVFP4 weights"
    if without:
        raise BuilderError(USAGE, f"{why}, so that --recipe {request.recipe} would have no effect; leave that out")


def _check_interface(request: Request) -> None:
    """What of the model's inputs and outputs no engine can have."""
    model = read_if_any(request.model)
    if model is None:
        return
    try:
        external_files(model, request.model.parent)
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{request.model}: {error}") from error
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [("input", value) for value in model.graph.input if value.name not in weights]
    for kind, value in [*inputs, *(("output", value) for value in model.graph.output)]:
        where = f"{request.model}: {kind} {value.name!r}"
        if (held := value.type.WhichOneof("value")) not in ("tensor_type", None):
            raise BuilderError(
                MODEL_AT_FAULT, f"{where} is of type {held.removesuffix('_type')}; an engine takes tensors alone"
            )
        tensor = value.type.tensor_type
        if tensor.elem_type in UNKNOWN_TO_TENSORRT:
            name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{where} is of type {name}, which TensorRT does not have; export the model with one that it has, such "
                "as int32, int64 or float32",
            )
        if kind == "input" and not tensor.HasField("shape"):
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{where} has no shape, not even a number of dimensions; export the model with one, whose dimensions "
                "may be dynamic",
            )


def _check_destination(request: Request, rewritten: bool) -> None:
    # First: '.' and '/' have no name to make those of files from.
    if request.bundle is not None and request.bundle.exists():
        raise BuilderError(USAGE, f"--bundle {request.bundle}: exists already; choose a new folder or remove this one")
    if request.dump_passes is not None and request.dump_passes.exists():
        raise BuilderError(
            USAGE, f"--dump-passes {request.dump_passes}: exists already; choose a new folder or remove this one"
        )
    files = [file for file in (request.output, request.timing_cache) if file is not None]
    for file in files:
        if file.is_dir():
            raise BuilderError(USAGE, f"{file}: is a folder, and a file is to be written; name one in it")
        if file.exists() and not file.is_file():
            raise BuilderError(USAGE, f"{file}: is a device or a pipe, which a file would replace; name a file")
    if request.output is not None and request.output.suffix == ".onnx":
        raise BuilderError(USAGE, f"-o {request.output}: names the engine, not an ONNX file; expected OUT.engine")
    if len({file.resolve() for file in files}) < len(files):
        raise BuilderError(USAGE, f"--timing-cache {request.timing_cache}: is the engine's file, too; choose another")
    if not rewritten:
        files += [request.file(".rewritten.onnx"), request.file(".rewritten.onnx.data")]
    if request.surgery is not None:
        files += [request.file(SURGERY), request.file(f"{SURGERY}.data")]
    if request.cache == "inplace":
        files += [request.file(".inplace.onnx"), request.file(".inplace.onnx.data")]
    if existing := [file for file in files if file.exists()]:
        inputs = [file for file in _inputs(request) if file.exists()]
        for file in existing:
            if any(file.samefile(read) for read in inputs):
                raise BuilderError(USAGE, f"{file}: would be written over, and this run reads it; choose another -o")
    exported = request.file(".onnx")
    if request.model.is_dir() and exported.exists() and not is_exported(read_if_any(exported)):
        raise BuilderError(
            USAGE, f"{exported}: is not the export of an earlier run, and would be written over; choose another -o"
        )


def _inputs(request: Request) -> Iterator[Path]:
    """What the run reads, files in folders and external data of the model included."""
    given = (request.plan, request.calib_data, request.accuracy_data, request.packed_weights, request.surgery)
    for path in (request.model, *given):
        if path is not None:
            yield split_function(path)[0]
            if path.is_dir():
                yield from (file for file in path.iterdir() if file.suffix in READ_IN_FOLDERS)
    model = read_if_any(request.model)
    if model is not None:
        yield from external_files(model, request.model.parent).values()
