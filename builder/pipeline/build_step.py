"""The engine, or the bundle to build it from."""

import os
import platform
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.filesize import decimal

from trt_nvfp4.builder.errors import BuildFailedError, UsageError, VerificationError
from trt_nvfp4.builder.inputs.decoder_profiles import with_stacked_caches
from trt_nvfp4.builder.inputs.shape_values import shape_values
from trt_nvfp4.builder.model.model import Model
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.builder.pipeline.shared_library import kernels_beside, share_library
from trt_nvfp4.builder.records.bundle import REFERENCE
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.tensorrt import build_process as engine
from trt_nvfp4.builder.tensorrt import bundle, triton
from trt_nvfp4.builder.tensorrt.build_script import choose_module
from trt_nvfp4.builder.tensorrt.kernels import kernels_of
from trt_nvfp4.builder.tensorrt.preflight import check_operators
from trt_nvfp4.builder.terminal.progress import Progress
from trt_nvfp4.common.replacing import made_folder, replacing, scratch
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.compile.kernel_groups import all_groups
from trt_nvfp4.plugins.compile.library import build_library, check_cache, find_build, find_packaged
from trt_nvfp4.plugins.compile.toolchain import ToolchainError


def build(run: Run, rewritten: Model) -> None:
    """Builds the engine of the rewritten model, or writes the bundle."""
    request, report, model = run.request, run.report, rewritten.path
    if choose_module(request.target.modules, request.target.compute_capability) == "tensorrt_rtx":
        check_operators(request.model, rewritten.proto)
    planned = bundle.planned_nodes(run.plan, rewritten)
    profiles = with_stacked_caches(run.profiles, rewritten.decoder)
    with report.timed("compile"):
        report.kernels = sorted(_kernels(request, rewritten, report))
        library, with_sources = _plugins(request, report, run.progress)
    destination = request.bundle or request.output
    given = model == request.model  # the user's file, which stays as it is
    assert destination is not None
    with report.timed("build"), scratch(destination.parent) as temporary:
        folder = temporary / "bundle"
        folder.mkdir()
        bundle.write_folder(
            folder,
            request.target,
            rewritten,
            planned,
            profiles,
            bundle.Plugins(library, with_sources, request.embed_plugins, report.kernels),
            bundle.FolderOptions(
                keep=request.bundle is not None,
                link_weights=request.bundle is None or not given,
                stripped=request.strip,
                weight_streaming=request.weight_streaming,
                timing_cache=request.timing_cache,
                original=request.model,
                reference=_reference(run, rewritten, temporary) if request.acceptance else None,
            ),
        )
        if request.strip and not (folder / bundle.NETWORK).exists():
            report.warnings.append("--strip: no plugin has weights, so that the engine holds all of the model")
        if request.bundle is not None:
            folder.rename(request.bundle)
            if not given:
                try:
                    bundle.share_weights(model, request.bundle)
                except BaseException:  # until then its files of weights have two names, from which onnx loads nothing
                    shutil.rmtree(request.bundle, ignore_errors=True)
                    raise
            report.bundle = str(request.bundle)
            if request.triton is not None:
                _write_triton(run, rewritten, None)
            return
        network = folder / bundle.NETWORK
        _check_memory(network if network.exists() else folder / "model.onnx", report)
        # Messages name the user's files, not those of the folder, which are gone by then.
        names = {folder / "model.onnx": model, folder / bundle.NETWORK: model, temporary / "out.engine": destination}
        if library is not None:
            names[folder / library.name] = library
        if request.timing_cache is not None:
            names[folder / "timing.cache"] = request.timing_cache
        result = engine.run_script(folder, temporary / "out.engine", forward(run.progress), names)
        if result["plugin_library"] is not None:  # first: an engine without it is of no use
            os.replace(temporary / result["plugin_library"], destination.parent / result["plugin_library"])
            report.files["plugin library"] = str(destination.parent / result["plugin_library"])
            report.plugin_library = result["plugin_library"]
            share_library(destination, report)
        if (weights := result["weights"]) is not None:
            os.replace(temporary / weights["file"], destination.parent / weights["file"])
            report.files["plugin weights"] = str(destination.parent / weights["file"])
        os.replace(temporary / "out.engine", destination)
        if request.timing_cache is not None and (folder / "timing.cache").exists():
            with replacing(request.timing_cache) as copy:  # may be on another file system
                shutil.copyfile(folder / "timing.cache", copy)
    report.take_engine({**result, "engine": str(destination)})
    carried = library is not None and request.embed_plugins
    report.plugin_library_bytes = library.stat().st_size if library is not None and carried else None
    if destination.stat().st_size != result["engine_bytes"]:
        raise VerificationError(f"{destination}: not the size that was written")
    if request.triton is not None:
        _write_triton(run, rewritten, destination)


def _write_triton(run: Run, rewritten: Model, engine: Path | None) -> None:
    """The engine, or what a bundle's device needs, as a model repository."""
    request, report = run.request, run.report
    assert request.triton is not None
    beside = report.plugin_library if engine is not None else None
    libraries = [] if engine is None or beside is None else [engine.with_name(beside)]
    shapes = shape_values(ir.from_proto(rewritten.proto).graph).keys()
    text = triton.config(request.base.name, rewritten.proto, shapes)
    with made_folder(request.triton):
        triton.write(request.triton, request.base.name, text, engine, libraries)
    report.files["Triton model repository"] = str(request.triton)


def _reference(run: Run, rewritten: Model, folder: Path) -> Path:
    """The logits, by ONNX Runtime, that the bundle's accept.py compares with. Raises UsageError for a model without
    caches."""
    from trt_nvfp4.builder.generate.acceptance import record
    from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner

    if run.request.bundle is None or rewritten.decoder is None or not rewritten.decoder.alone:
        raise UsageError("--set acceptance: is for --bundle of a language model with key-value caches")
    run.progress.stage("recording logits for accept.py")
    record(OnnxRunner(rewritten.path), folder / REFERENCE)
    return folder / REFERENCE


def check_toolchain(request: Request, plan: Plan) -> None:
    """Raises ToolchainError where plugins would have to be compiled here and cannot, before anything is quantized. A
    device compiles those of its bundle where they cannot be compiled here."""
    if request.stop_after is not None or request.bundle is not None:
        return
    target = request.target
    if find_packaged(target.arch, target.host) is None and any(entry.lowering.is_plugin for entry in plan.subgraphs):
        check_cache(find_build(target.arch, machine=target.host))


def _kernels(request: Request, model: Model, report: Report) -> Set[str]:
    """Groups of kernels to link: those that the model needs, and those of engines that share its library."""
    needed = kernels_of(model.proto)
    if request.all_kernels and needed:
        return all_groups()
    shares = needed and not request.embed_plugins and request.bundle is None
    return needed | kernels_beside(request.output, report) if shares and request.output is not None else needed


def _plugins(request: Request, report: Report, progress: Progress) -> tuple[Path | None, bool]:
    """The target's plugin library with the report's kernels, and whether its sources must travel because it cannot be
    built here."""
    if not report.kernels:
        return None, False
    target = request.target
    progress.stage(f"compiling {len(report.kernels)} groups of kernels for {target.arch} (once; cached)")
    try:
        return build_library(target.arch, groups=report.kernels, machine=target.host, progress=progress.step), False
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
        raise BuildFailedError(
            f"the build needs about {decimal(estimate.needed)} of memory for {decimal(estimate.weights)} of weights, "
            f"and {decimal(estimate.available)} are free; free some, or add --bundle DIR and build on a larger machine"
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
