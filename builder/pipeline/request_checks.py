"""Checks of a request before any work."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.checkpoints.directory import quantized_directory
from trt_nvfp4.builder.model.model_files import check_model_file, is_model_directory
from trt_nvfp4.builder.model.onnx_file import is_exported, is_rewritten, read_if_any
from trt_nvfp4.builder.pipeline.build_options import (
    ONNX,
    ONNX_CACHES,
    PARTS,
    PLAN,
    PLAN_WITHOUT_REQUIRE,
    REWRITTEN,
    TASK_FEATURES,
)
from trt_nvfp4.builder.pipeline.request import SURGERY, Request
from trt_nvfp4.builder.targets import require_here
from trt_nvfp4.builder.tensorrt import triton
from trt_nvfp4.builder.tensorrt.backend import FEATURES
from trt_nvfp4.builder.tensorrt.build_script import choose_module
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.samples.text import open_text
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.external_data import external_files
from trt_nvfp4.graph_passes.planning.kinds.attention import check_kv_cache
from trt_nvfp4.graph_passes.planning.kinds.registry import DEFAULT_KINDS, KINDS, select
from trt_nvfp4.graph_passes.planning.plan import Plan

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


def check(request: Request, given: onnx.ModelProto | None) -> None:
    """Refuse requests that cannot succeed, would ignore an option or destroy a file.

    `given`: what the model's file holds; None for a directory, and for a file that cannot be read.

    Raises BuilderError, CalibrationError (an unknown recipe) or PlanError.
    """
    rewritten = is_rewritten(given)
    if request.acceptance and request.bundle is None:
        raise UsageError("--set acceptance=yes adds a script to a bundle, and none is written: add --bundle DIR")
    _check_triton(request)
    _check_names(request)
    _check_export(request)
    _check_budget(request)
    _check_ignored(request, rewritten)
    _check_calibration(request)
    _check_selection(request)
    _check_recipe(request)
    _check_layers(request)
    _check_adapter(request)
    _check_inputs(request, given)
    plan = _checked_plan(request, rewritten)
    _check_recipe_has_effect(request, plan)
    _check_kv_cache(request)
    check_streaming(request)
    _check_interface(request, given)
    check_texts(request)
    _check_destination(request, rewritten, given)


def _check_triton(request: Request) -> None:
    if request.triton is None:
        return
    triton.check_name(request.base.name)
    if request.stop_after is not None:
        raise UsageError(f"--set triton={request.triton}: --stop-after builds no engine; leave one out")
    target = request.target
    builder = choose_module(target.modules, target.compute_capability)
    if request.bundle is None and target.unsupported_here() is None and builder != "tensorrt":
        raise UsageError(
            f"--set triton={request.triton}: {builder} builds engines for {target.name} here, and Triton runs those of "
            "the package tensorrt; leave it out, or add --bundle DIR and build on the device with that package"
        )


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
            raise UsageError(
                f"{shown}: is not a name in UTF-8, which ONNX and TensorRT need; rename the file or the folder"
            ) from error
        if meant != name:
            raise UsageError(
                f"{meant}: is a name in UTF-8, which Python takes for {sys.getfilesystemencoding()} in this locale; "
                "set PYTHONUTF8=1, or a locale of UTF-8, such as LC_ALL=C.UTF-8"
            )


def check_no_pipeline(request: Request) -> None:
    """Raise UsageError for options of diffusers pipelines."""
    if request.pipeline_arguments is not None:
        raise UsageError(
            f"--set pipeline-arguments={request.pipeline_arguments}: {request.model} is not a diffusers pipeline; "
            "leave it out"
        )


def _check_export(request: Request) -> None:
    """Options about an export, and about the caches that it makes or that are converted."""
    check_no_pipeline(request)
    if request.task == "features" and (given := request.given(TASK_FEATURES)):
        raise UsageError(f"{', '.join(given)}: --task features exports no caches; leave one out")
    if request.model.is_dir():
        if request.cache == "inplace":
            raise UsageError(
                f"{request.model}: --cache inplace is for ONNX models: a Hugging Face directory is exported so anyway; "
                "leave it out"
            )
        return
    given = request.given(ONNX) + (request.given(ONNX_CACHES) if request.cache == "keep" else [])
    if given:
        raise UsageError(
            f"{request.model}: is not exported, so that {', '.join(given)} would have no effect; leave that out"
        )


def _check_budget(request: Request) -> None:
    if request.accuracy_budget is None:
        if request.accuracy_data is not None:
            raise UsageError("--accuracy-data is what --accuracy-budget is verified with: add one")
        return
    if request.precision == "native-nvfp4":
        raise UsageError(
            "--accuracy-budget measures with ONNX Runtime, which has no FP4: leave out --precision native-nvfp4"
        )
    if request.plan is not None:
        raise UsageError("--plan and --accuracy-budget both decide on precisions; leave one out")
    if request.calib_data is None or is_statistics(request.calib_data):
        raise UsageError("--accuracy-budget needs input samples to measure with: add --calib-data FILE|DIR")


def check_parts(request: Request, why: str) -> None:
    """Raise BuilderError for options of one graph's run, given for a model of several; for FP8 caches without samples,
    as the scales in a checkpoint are those of one graph; without a destination; and where nothing can be built here."""
    if given := request.given(PARTS):
        raise UsageError(f"{', '.join(given)}: {why}")
    _check_kv_cache(request, published=False)
    if request.bundle is None and request.output is None:
        raise UsageError("no output is given: add -o FOLDER or --bundle FOLDER")
    if request.bundle is None:
        require_here(request.target)
    check_streaming(request)


def _check_ignored(request: Request, rewritten: bool) -> None:
    """Options about what a plan has decided, or a rewrite has done."""
    if request.plan is None:
        return
    given = request.given(PLAN)
    if request.require is None:
        given += request.given(PLAN_WITHOUT_REQUIRE)
    if rewritten:
        given += [flag for flag in request.given(REWRITTEN) if flag not in given]
    if given:
        done = f"{request.model} has been rewritten" if rewritten else f"{request.plan} has decided"
        raise UsageError(f"{done} already, so that {', '.join(given)} would have no effect; leave that out")


def _checked_plan(request: Request, rewritten: bool) -> Plan | None:
    """The plan that was given, for this target. Raises BuilderError or PlanError for what is wrong with it whatever the
    model is."""
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    if plan.target != request.target.name:
        raise UsageError(
            f"{request.plan} is a plan for {plan.target}, not for {request.target.name}; plan again or change --target"
        )
    plan.check_by_itself(None if rewritten else request.target.capabilities)
    return plan


def _has_cache_scales(directory: Path) -> bool:
    """Whether a Hugging Face directory has scales for FP8 caches."""
    found = quantized_directory(directory) if is_model_directory(directory) else None
    return found is not None and found.cache_format == "FP8" and bool(found.cache_scales)


def _check_kv_cache(request: Request, published: bool | None = None) -> None:
    if request.kv_cache != "fp8" or request.is_part:
        return
    has_scales = request.calib_data is not None or (
        _has_cache_scales(request.model) if published is None else published
    )
    try:
        check_kv_cache(request.attention, request.kv_cache, has_scales)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_calibration(request: Request) -> None:
    if request.stop_after == "calibrate" and (request.calib_data is None or is_statistics(request.calib_data)):
        raise UsageError(
            "--stop-after calibrate: nothing would be calibrated; give input samples with --calib-data FILE|DIR"
        )


def check_streaming(request: Request) -> None:
    """That what builds the engine on this machine, if something does, can stream its weights."""
    target = request.target
    if not request.weight_streaming or request.output is None or request.bundle is not None or request.stop_after:
        return
    module = choose_module(target.modules, target.compute_capability)
    if target.unsupported_here() is None and module not in FEATURES["weight_streaming"]:
        raise UsageError(
            f"--set weight-streaming=yes: {module} builds engines for {target.name} here, and only tensorrt streams "
            "weights; leave it out"
        )


def _check_selection(request: Request) -> None:
    if request.require_fast and request.require is None:
        raise UsageError("--set require-fast=yes is about the subgraphs that --require names: add --require nvfp4")
    if request.keep_fp32 is not None and request.activations == "keep":
        raise UsageError(
            f"--activations keep leaves everything as it is: leave it or --set keep-fp32={request.keep_fp32} out"
        )
    try:
        select(DEFAULT_KINDS if request.kinds is None else request.kinds, request.include, request.exclude)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_layers(request: Request) -> None:
    whole = [kind for kind in request.kinds or () if KINDS[kind].is_whole_layer]
    if request.is_part and whole:
        raise UsageError(f"--kinds {whole[0]}: layers of a model of several parts stay apart; leave {whole[0]} out")


def _check_adapter(request: Request) -> None:
    if request.adapter is None:
        return
    if not request.model.is_dir():
        raise UsageError(
            f"--adapter {request.adapter.directory}: {request.model} is not a Hugging Face directory, and an adapter "
            "is merged into the model of one; give that of the model it was trained on"
        )
    if request.packed_weights is not None:
        raise UsageError(
            "--set packed-weights are those of a model without --adapter; leave one of them out, or merge both before"
        )


def _check_recipe(request: Request) -> None:
    if request.packed_weights is not None and request.recipe is not None and parse(request.recipe).awq:
        raise UsageError(
            f"recipe '{request.recipe}' scales channels of weights, and --set packed-weights takes them as they are; "
            "leave awq or --set packed-weights out"
        )
    needs = parse(request.recipe).needs if request.recipe is not None else frozenset()
    if needs and request.calib_data is None:
        raise UsageError(
            f"recipe '{request.recipe}' needs {', '.join(sorted(needs))} of the activations: give input samples with "
            "--calib-data, or choose a recipe that needs none, such as mse"
        )


def _check_inputs(request: Request, given: onnx.ModelProto | None) -> None:
    if given is None:
        check_model_file(request.model)
    if not request.model.is_file() and not request.model.is_dir():
        raise ModelFaultError(f"{request.model}: is a pipe or a device, and a model is read several times; give a file")
    for option in ("plan", "calib_data", "accuracy_data", "packed_weights", "surgery"):
        path: Path | None = getattr(request, option)
        if path is not None and not split_function(path)[0].exists():
            raise UsageError(f"{Request.stated(option, path)}: no such file or folder")


def check_texts(request: Request) -> None:
    """Check calibration text, and the tokenizer for it, before an export."""
    for file in (request.calib_data, request.accuracy_data):
        if file is not None and file.suffix in TEXTS and request.model.is_dir():
            open_text(file, request.model, request.trust_remote_code)


def _check_recipe_has_effect(request: Request, plan: Plan | None) -> None:
    if request.recipe is None:
        return
    if plan is not None:
        without = all(entry.lowering.weights != "nvfp4" for entry in plan.subgraphs)
        why = f"{request.plan} has no NVFP4 subgraph"
    else:
        without = request.precision in ("fp8", "bf16")
        why = f"--precision {request.precision} has no NVFP4 weights"
    if without:
        raise UsageError(f"{why}, so that --recipe {request.recipe} would have no effect; leave that out")


def _check_interface(request: Request, model: onnx.ModelProto | None) -> None:
    """Raise ModelFaultError for inputs and outputs that no engine can have."""
    if model is None:
        return
    try:
        external_files(model, request.model.parent)
    except ValueError as error:
        raise ModelFaultError(f"{request.model}: {error}") from error
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [("input", value) for value in model.graph.input if value.name not in weights]
    for kind, value in [*inputs, *(("output", value) for value in model.graph.output)]:
        where = f"{request.model}: {kind} {value.name!r}"
        if (held := value.type.WhichOneof("value")) not in ("tensor_type", None):
            raise ModelFaultError(f"{where} is of type {held.removesuffix('_type')}; an engine takes only tensors")
        tensor = value.type.tensor_type
        if tensor.elem_type in UNKNOWN_TO_TENSORRT:
            name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
            raise ModelFaultError(
                f"{where} is of type {name}, which TensorRT does not have; export the model with one that it has, such "
                "as int32, int64 or float32"
            )
        if kind == "input" and not tensor.HasField("shape"):
            raise ModelFaultError(
                f"{where} has no shape, not even a number of dimensions; export the model with one, whose dimensions "
                "may be dynamic"
            )


def _check_destination(request: Request, rewritten: bool, given: onnx.ModelProto | None) -> None:
    # First: '.' and '/' have no name to make those of files from.
    if request.bundle is not None and request.bundle.exists():
        raise UsageError(f"--bundle {request.bundle}: exists already; choose a new folder or remove this one")
    if request.dump_passes is not None and request.dump_passes.exists():
        raise UsageError(
            f"--set dump-passes={request.dump_passes}: exists already; choose a new folder or remove this one"
        )
    files = [file for file in (request.output, request.timing_cache) if file is not None]
    for file in files:
        if file.is_dir():
            raise UsageError(f"{file}: is a folder, and a file is to be written; name one in it")
        if file.exists() and not file.is_file():
            raise UsageError(f"{file}: is a device or a pipe, which a file would replace; name a file")
    if request.output is not None and request.output.suffix == ".onnx":
        raise UsageError(f"-o {request.output}: names the engine, not an ONNX file; expected OUT.engine")
    if len({file.resolve() for file in files}) < len(files):
        raise UsageError(f"--set timing-cache={request.timing_cache}: is the engine's file, too; choose another")
    if not rewritten:
        files += [request.file(".rewritten.onnx"), request.file(".rewritten.onnx.data")]
    if request.surgery is not None:
        files += [request.file(SURGERY), request.file(f"{SURGERY}.data")]
    if request.cache == "inplace":
        files += [request.file(".inplace.onnx"), request.file(".inplace.onnx.data")]
    if existing := [file for file in files if file.exists()]:
        inputs = [file for file in _inputs(request, given) if file.exists()]
        for file in existing:
            if any(file.samefile(read) for read in inputs):
                raise UsageError(f"{file}: would be written over, and this run reads it; choose another -o")
    exported = request.file(".onnx")
    if request.model.is_dir() and exported.exists() and not is_exported(read_if_any(exported)):
        raise UsageError(
            f"{exported}: is not the export of an earlier run, and would be written over; choose another -o"
        )


def _inputs(request: Request, model: onnx.ModelProto | None) -> Iterator[Path]:
    """The files that the run reads, those in folders and external data of the model included."""
    given = (request.plan, request.calib_data, request.accuracy_data, request.packed_weights, request.surgery)
    for path in (request.model, *given):
        if path is not None:
            yield split_function(path)[0]
            if path.is_dir():
                yield from (file for file in path.iterdir() if file.suffix in READ_IN_FOLDERS)
    if model is not None:
        yield from external_files(model, request.model.parent).values()
