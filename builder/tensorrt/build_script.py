"""Builds an engine from a manifest, and checks that it holds what was planned.

It needs Python and TensorRT's package, nothing else: every build runs it in a process of its own (so that the weights'
memory ends with it), and a bundle carries it behind its `build_engine.py`. What is built on a device is therefore
built and checked by the same code as what is built here.

usage: build_engine.py [-o OUT.engine] [--events]

Exit codes: 0 done, 2 usage, 3 the model or bundle is at fault, 4 target, back end or Python 3.9 unavailable,
5 verification failed, 6 build failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import (
    BUILD_FAILED,
    INTERRUPTED,
    BuilderError,
    ModelFaultError,
    UnavailableError,
    UsageError,
    VerificationError,
    message,
    printable,
)
from trt_nvfp4.builder.records.bundle import DRAFT, MANIFEST, named_file
from trt_nvfp4.builder.tensorrt.backend import FEATURES, Backend, Event, Report, version_tuple
from trt_nvfp4.builder.tensorrt.job import Job, Weights
from trt_nvfp4.builder.tensorrt.network_checks import AttentionNode
from trt_nvfp4.builder.tensorrt.verify import (
    PlannedNodes,
    check_layers,
    copied_caches,
    copied_weights,
    float32_products,
)
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import made_folder, replacing
from trt_nvfp4.plugins.compile.ownership import own_folder

TEMPORARY_LINKS = "trt-nvfp4-links-"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def read_job(manifest: Path, output: Path | None) -> Job:
    """The job by the manifest, with its engine's place. Raises ModelFaultError for an invalid manifest."""
    try:
        data = read_json(manifest)
        folder = manifest.resolve().parent
        capability = tuple(data["compute_capability"])
        # The chosen module is imported.
        if unknown := set(data["modules"]) - {"tensorrt", "tensorrt_rtx"}:
            raise ValueError(f"{unknown.pop()!r} is not a TensorRT module")
        module = choose_module(data["modules"], capability)

        def file(name: str) -> Path:
            return named_file(folder, name)

        def inside(name: str | None) -> Path | None:
            return None if name is None else file(name)

        # Manifests of earlier versions say nothing of it.
        weights = data.get("weights")
        return Job(
            target=data["target"],
            arch=data["arch"],
            compute_capability=capability,
            module=module,
            oldest_version=data["modules"][module],
            model=file(data["model"] if weights is None else weights["network"]),
            engine=(output or file(data["engine"])).absolute(),
            plugin_library=inside(data["plugin_library"]),
            plugin_sources=inside(data["plugin_sources"]),
            embed_plugins=bool(data["embed_plugins"]),
            timing_cache=inside(data["timing_cache"]),
            profiles=[
                {name: tuple(tuple(shape) for shape in shapes) for name, shapes in profile.items()}
                for profile in data["profiles"]
            ],
            planned=tuple(_planned(entry) for entry in data["planned"]),
            attentions={name: AttentionNode(**entry) for name, entry in data["attentions"].items()},
            caches=dict(data["caches"]),
            checksums={file(name): digest for name, digest in data["checksums"].items()},
            kernels=tuple(map(str, data.get("kernels", ()))),
            weights=None
            if weights is None
            else Weights(file(weights["file"]), str(weights["digest"]), tuple(weights["inputs"])),
            weight_streaming=bool(data.get("weight_streaming")),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFaultError(f"{manifest}: not a manifest of trt-nvfp4 ({error!r})") from error


def _planned(entry: dict[str, Any]) -> PlannedNodes:
    lists = {key: tuple(entry[key]) for key in ("datatypes", "engine_nodes", "quantized")}
    return PlannedNodes(**{**entry, **lists})


def _check_output(job: Job, manifest: Path) -> None:
    """Refuse, before minutes of building, to write over what the bundle holds."""
    if job.engine.exists() and not job.engine.is_file():
        raise UsageError(f"{job.engine}: is a folder or a device, and would be replaced; choose another -o")
    own = [manifest, job.model, job.plugin_library, job.timing_cache, *job.checksums]
    own += [] if job.weights is None else [job.weights.file]
    if any(file is not None and file.resolve() == job.engine.resolve() for file in own):
        raise UsageError(f"{job.engine}: would be written over, and belongs to the bundle; choose another -o")


def report_file(engine: Path) -> Path:
    """Where the report of an engine lies."""
    base = base_of(engine)
    return base.with_name(f"{base.name}.report.json")


def base_of(engine: Path) -> Path:
    """The engine's file without its suffix; names hold dots of their own: Qwen2.5-7B."""
    return engine.with_suffix("") if engine.suffix in (".engine", ".plan") else engine


def choose_module(modules: dict[str, str], compute_capability: tuple[int, ...]) -> str:
    """The first module (name -> oldest version) that serves; else the first installed one, whose error explains, or the
    first."""
    installed = [name for name in modules if importlib.util.find_spec(name) is not None]
    serving = (name for name in installed if _serves(name, modules[name], compute_capability))
    return next(serving, (installed or list(modules))[0])


def _serves(module: str, oldest: str, compute_capability: tuple[int, ...]) -> bool:
    try:
        # Not imported: one process holds one TensorRT.
        version = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        version = oldest  # its import will tell
    here = module in FEATURES["set_compute_capability"] or driver.local_compute_capability() == compute_capability
    return here and version_tuple(version) >= version_tuple(oldest)


def _offer_unversioned_library(module: str) -> None:
    """Restart with a folder on the loader's path that holds the unversioned name which the parser opens.

    A link in the cache and not in site-packages: that may be read-only. The loader reads its path at start only.
    A cache that is read-only too, or that others can write to, is replaced by a temporary folder, which goes as soon as
    the library is loaded: the loader then knows it by that name.
    """
    library, restarted = f"lib{module}.so", os.environ.get("TRT_NVFP4_LIBRARY_LINKS")
    if restarted is not None:
        if Path(restarted).name.startswith(TEMPORARY_LINKS) and Path(restarted).is_dir():
            ctypes.CDLL(library)
            (Path(restarted) / library).unlink()
            Path(restarted).rmdir()
        return
    package = importlib.util.find_spec(f"{module}_libs")
    if module not in FEATURES["parser_opens_unversioned_library"] or package is None:
        return
    folder = Path((package.submodule_search_locations or [""])[0])
    versioned = next(folder.glob(f"{library}.*"), None)
    if versioned is None or (folder / library).exists():
        return
    try:
        named = os.environ.get("TRT_NVFP4_CACHE")
        cache = Path(named).expanduser() if named else Path.home() / ".cache" / "trt-nvfp4"
        # What lies there is loaded.
        links = own_folder(cache, "links", hashlib.sha256(str(versioned).encode()).hexdigest()[:16])
        with replacing(links / library) as temporary:
            temporary.symlink_to(versioned)
    except (OSError, RuntimeError):  # users of containers may have no home
        links = Path(tempfile.mkdtemp(prefix=TEMPORARY_LINKS))
        (links / library).symlink_to(versioned)
    environment = dict(os.environ, TRT_NVFP4_LIBRARY_LINKS=str(links))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(links), os.environ.get("LD_LIBRARY_PATH")]))
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _build_library(job: Job, report: Report) -> Path | None:
    """The plugin library; compiled here where the bundle carries its sources, with nvcc found on the device."""
    if job.plugin_sources is None:
        return job.plugin_library
    report({"event": "stage", "stage": "compile"})
    try:
        library: Any = importlib.import_module("trt_nvfp4.plugins.compile.library")
        toolchain: Any = importlib.import_module("trt_nvfp4.plugins.compile.toolchain")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"compiling the plugin library needs the package {error.name}; install it: pip install {error.name}"
        ) from error
    try:
        return Path(library.build_library(job.arch, groups=job.kernels or None))
    except toolchain.ToolchainError as error:
        raise UnavailableError(str(error)) from error


def _plugin_error(library: Path | None) -> str:
    """The first error of a plugin since the last call: TensorRT swallows those of workspaces and serialization."""
    if library is None:
        return ""
    try:
        query = ctypes.CDLL(str(library)).trtNvfp4LastError
    except OSError:  # nor could TensorRT load it, which says so
        return ""
    query.restype = ctypes.c_char_p
    return bytes(query()).decode()


def _check_kernels(library: Path, needed: Sequence[str]) -> None:
    """Raise VerificationError where the library lacks kernels that a tactic of the model's plugins could
    need."""
    query = ctypes.CDLL(str(library)).trtNvfp4LinkedKernels
    query.restype = ctypes.c_char_p
    if missing := sorted(set(needed) - set(bytes(query()).decode().split())):
        raise VerificationError(
            f"{library}: has no kernels {', '.join(missing)}, which nodes of the model need; build it again with "
            "--set all-kernels=yes"
        )


def run(job: Job, report: Report) -> dict[str, Any]:
    """Build the engine of `job`, check it, write it; returns the result that goes into the report."""
    started = time.monotonic()
    timings: dict[str, float] = {}

    def lap(stage: str) -> None:
        timings[stage] = round(time.monotonic() - started - sum(timings.values()), 3)

    for path, digest in job.checksums.items():
        if not path.exists() or sha256(path) != digest:
            raise ModelFaultError(f"{path}: missing or changed since the bundle was written; copy the bundle again")
    backend = Backend(job.module)
    if version_tuple(backend.version) < version_tuple(job.oldest_version):
        raise UnavailableError(
            f"{job.module} {backend.version} is too old for {job.target}: {job.oldest_version} or newer"
        )
    library = _build_library(job, report)
    lap("prepare")
    try:
        engine, layers, warnings, products = backend.build(job, library, report)
    except BuilderError as error:
        if reason := _plugin_error(library):
            raise BuilderError(f"{error} (a plugin said: {reason})", error.exit_code) from error
        raise
    lap("build")

    report({"event": "stage", "stage": "check"})
    if not layers:
        raise VerificationError("TensorRT listed no layers: what it built cannot be checked")
    if reason := _plugin_error(library):
        raise VerificationError(f"a plugin failed during the build and TensorRT went on: {reason}")
    if library is not None:
        _check_kernels(library, job.kernels)
    realized = check_layers(layers, job.planned, max(1, len(job.profiles)))
    short = [entry for entry in realized if entry.problem]
    if short:
        listed = "; ".join(f"{entry.name}: {entry.problem}" for entry in short)
        raise VerificationError(f"the engine is not what was planned: {listed}")
    if copied := list(copied_caches(layers, job.planned, job.caches, max(1, len(job.profiles)))):
        raise VerificationError(f"the engine is not what was planned: {'; '.join(copied)}")
    if job.weights is not None and (
        copied := list(copied_weights(layers, job.weights.inputs, max(1, len(job.profiles))))
    ):
        raise VerificationError(f"the engine is not what was planned: {'; '.join(copied)}")
    size = engine.nbytes
    if size == 0:
        raise VerificationError("TensorRT returned an empty engine and no error")
    with replacing(job.engine) as temporary:
        with temporary.open("wb") as file:
            file.write(memoryview(engine))
            file.flush()
            os.fsync(file.fileno())
        del engine
        if temporary.stat().st_size != size:
            raise VerificationError(f"{job.engine}: wrote {temporary.stat().st_size} of {size} bytes")
        digest = sha256(temporary)
    beside = None if library is None or job.embed_plugins else _put_beside(job.engine, library)
    weights = None if job.weights is None else _put_weights_beside(job.engine, job.weights)
    lap("check")
    return {
        "target": job.target,
        "backend": job.module,
        "engine": str(job.engine),
        "engine_bytes": size,
        "engine_sha256": digest,
        "engine_layers": len(layers),
        "plugin_library": beside,
        "kernels": list(job.kernels),
        "weights": weights,
        "plugin_layers": sum(layer.is_plugin for layer in layers if layer.profile == 0),
        "caches_in_place": len(job.caches),
        "float32_products": float32_products(layers, products),
        "subgraphs": [asdict(entry) for entry in realized],
        "timings_s": timings,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {job.module: backend.version, "python": platform.python_version()},
        "warnings": list(dict.fromkeys(warnings)),
    }


def _put_beside(engine: Path, library: Path) -> str:
    """The name of the plugin library in the engine's folder, copied there unless it is there already."""
    place = engine.parent / library.name
    if not (place.exists() and sha256(place) == sha256(library)):
        with replacing(place) as temporary:
            shutil.copy(library, temporary)
    return library.name


def _put_weights_beside(engine: Path, weights: Weights) -> dict[str, Any]:
    """Put the weights into the engine's folder, one file for all engines with the same; returns the report's entry."""
    place = engine.parent / weights.file.name
    if not (place.exists() and place.samefile(weights.file)):
        with replacing(place) as temporary:
            try:
                os.link(weights.file, temporary)
            except OSError:  # on another file system
                shutil.copy(weights.file, temporary)
    found = {"file": place.name, "digest": weights.digest, "tensors": len(weights.inputs)}
    return {**found, "bytes": place.stat().st_size}


def _print_text(event: Event) -> None:
    if event["event"] == "stage":
        print(f"{event['stage']} ...", file=sys.stderr, flush=True)
    elif event["event"] == "step":
        print(f"  {event['phase']}: {event['step']}/{event['steps']}", file=sys.stderr, flush=True)


def _print_events(event: Event) -> None:
    print(json.dumps(event), flush=True)


def main(folder: Path, given: Sequence[str] | None = None) -> int:
    """Build the engine of `folder`, and of the drafter in it, as the command line or `given` says; returns the exit
    code."""
    parser = argparse.ArgumentParser(description="Build and check the TensorRT engine of this bundle.")
    parser.add_argument("-o", "--output", type=Path, help="engine file (default: as the manifest says, beside it)")
    parser.add_argument("--events", action="store_true", help="progress and result as JSON lines on stdout")
    arguments = parser.parse_args(given)
    report = _print_events if arguments.events else _print_text
    # What ends a process on a server cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = read_job(folder / MANIFEST, arguments.output)
        _check_output(job, folder / MANIFEST)
        with made_folder(job.engine.parent):
            _offer_unversioned_library(job.module)
            result = run(job, report)
            if arguments.events:
                report({"event": "result", **result})
            else:
                with replacing(report_file(job.engine)) as temporary:
                    temporary.write_text(json.dumps(result, indent=2) + "\n")
                built = f"{result['engine_bytes']} bytes, {result['plugin_layers']} plugin layers, as planned"
                print(f"{job.engine}: {built}")
        if not (folder / DRAFT / MANIFEST).is_file():
            return 0
        output = [] if arguments.output is None else ["-o", str(base_of(job.engine)) + f".{DRAFT}.engine"]
        return main(folder / DRAFT, [*output, *(["--events"] if arguments.events else [])])
    except (BuilderError, OSError) as error:
        code = BUILD_FAILED if isinstance(error, OSError) else error.exit_code
        if arguments.events:
            report({"event": "error", "exit_code": code, "message": message(error)})
        else:
            print(f"error: {printable(message(error))}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        if not arguments.events:
            print("error: interrupted; nothing half-written was left", file=sys.stderr)
        return INTERRUPTED
