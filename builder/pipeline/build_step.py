"""The engine, or the bundle to build it from."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from trt_nvfp4.builder.errors import BUILD_FAILED, VERIFICATION_FAILED, BuilderError
from trt_nvfp4.builder.export.decoder_contract import decoder_of
from trt_nvfp4.builder.inputs.decoder_profiles import with_stacked_caches
from trt_nvfp4.builder.inputs.shapes import Profiles
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.tensorrt import build_process as engine
from trt_nvfp4.builder.tensorrt import bundle
from trt_nvfp4.builder.tensorrt.verify import PlannedNodes
from trt_nvfp4.common.replacing import replacing, scratch
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.compile.library import build_library, check_cache, find_build
from trt_nvfp4.plugins.compile.toolchain import ToolchainError


def build(
    request: Request,
    plan: Plan,
    model: Path,
    profiles: Sequence[Profiles],
    report: Report,
    progress: Progress,
) -> None:
    planned = bundle.planned_nodes(plan, model)
    profiles = with_stacked_caches(profiles, decoder_of(read(model)))
    with report.timed("compile"):
        library, with_sources = _plugins(request, planned, report, progress)
    destination = request.bundle or request.output
    given = model == request.model  # the user's file, which stays as it is
    assert destination is not None
    with report.timed("build"), scratch(destination.parent) as temporary:
        folder = temporary / "bundle"
        folder.mkdir()
        bundle.write_folder(
            folder,
            request.target,
            model,
            planned,
            profiles,
            library,
            with_sources,
            timing_cache=request.timing_cache,
            keep=request.bundle is not None,
            link_weights=request.bundle is None or not given,
            embed_plugins=request.embed_plugins,
            stripped=request.strip,
            weight_streaming=request.weight_streaming,
            original=request.model,
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
            return
        network = folder / bundle.NETWORK
        _check_memory(network if network.exists() else folder / "model.onnx", report)
        # Messages name the user's files, not those of the folder, which are gone by then.
        names = {folder / "model.onnx": model, folder / bundle.NETWORK: model, temporary / "out.engine": destination}
        if library is not None:
            names[folder / library.name] = library
        if request.timing_cache is not None:
            names[folder / "timing.cache"] = request.timing_cache
        result = engine.run_script(folder, temporary / "out.engine", forward(progress), names)
        if result["plugin_library"] is not None:  # first: an engine without it is of no use
            os.replace(temporary / result["plugin_library"], destination.parent / result["plugin_library"])
            report.files["plugin library"] = str(destination.parent / result["plugin_library"])
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
        raise BuilderError(VERIFICATION_FAILED, f"{destination}: not the size that was written")


def check_toolchain(request: Request, plan: Plan) -> None:
    """Raises ToolchainError where plugins would have to be compiled here and cannot, before anything is quantized. A
    device compiles those of its bundle where they cannot be compiled here."""
    if request.stop_after is not None or request.bundle is not None:
        return
    if any(entry.lowering.is_plugin for entry in plan.subgraphs):
        check_cache(find_build(request.target.arch, machine=request.target.host))


def _plugins(
    request: Request, planned: Sequence[PlannedNodes], report: Report, progress: Progress
) -> tuple[Path | None, bool]:
    """The plugin library of the target, and whether its sources must travel because it cannot be built here."""
    if not any(entry.carrier == "plugin" for entry in planned):
        return None, False
    progress.stage(f"compiling the plugin library for {request.target.arch} (once; cached)")
    try:
        return build_library(request.target.arch, machine=request.target.host, progress=progress.step), False
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
        raise BuilderError(
            BUILD_FAILED,
            f"the build needs about {decimal(estimate.needed)} of memory for {decimal(estimate.weights)} of weights, "
            f"and {decimal(estimate.available)} are free; free some, or add --bundle DIR and build on a larger machine",
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
