"""Loads an engine on the GPU that it was built for, with an error that says what stands in the way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import ModelFaultError, UnavailableError
from trt_nvfp4.builder.tensorrt import backend, build_script
from trt_nvfp4.builder.tensorrt.runtime_cache import EngineWithCache
from trt_nvfp4.builder.tensorrt.weights_file import named_digest
from trt_nvfp4.common.json_text import read_json

MODULES = ("tensorrt", "tensorrt_rtx")


def built_by(engine: Path) -> dict[str, Any]:
    """The report beside an engine, where there is one: its `backend`, `versions`, `model`, `target`, ..."""
    try:
        found = read_json(build_script.report_file(engine))
    except (OSError, ValueError, RecursionError):
        return {}
    described = isinstance(found, dict) and all(isinstance(found.get(key, {}), dict) for key in ("versions", "files"))
    return found if described else {}


def opt_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Opt-profile input shapes from the report beside the file `path`; {} without a report."""
    try:
        return {name: tuple(map(int, shape)) for name, (_, shape, _) in built_by(path).get("profiles", {}).items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def _library_beside(engine: Path, name: Any) -> Path:
    """The plugin library of an engine that does not carry it; the report may name no file elsewhere."""
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise ModelFaultError(
            f"{build_script.report_file(engine)}: plugin_library is {name!r}, expected the name of a file beside the "
            "engine; build the engine again"
        )
    library = engine.parent / name
    if not library.is_file():
        raise ModelFaultError(
            f"{engine}: its plugin library {name} does not lie beside it; copy the two together, or build the engine "
            "with --embed-plugins yes"
        )
    return library


def load_engine(path: Path) -> tuple[Any, backend.Backend]:
    """The deserialized engine (`ICudaEngine`) and the back end that loaded it; with TensorRT-RTX, kernels that it
    compiles are kept beside the engine (see `runtime_cache`). One built with --strip has its weights from the file
    beside it (see `bound_weights`).

    Raises BuilderError: model when `path` is not a file, unavailable when there is no NVIDIA GPU, no TensorRT, or
    TensorRT refuses the engine (built by another version, or for another GPU).
    """
    if not path.is_file():
        raise ModelFaultError(f"{path}: no such file")
    report = built_by(path)
    installed = [name for name in MODULES if importlib.util.find_spec(name)]
    # A report may name anything, and what is chosen is imported.
    module = report["backend"] if report.get("backend") in MODULES else next(iter(installed), None)
    built_with = report.get("versions", {}).get(module)
    origin = f"{path} was built by {module} {built_with} for {report.get('target')}" if built_with else str(path)
    if driver.local_compute_capability() is None:
        rewritten = path.with_suffix(".rewritten.onnx")
        instead = f"; {rewritten} computes the same without one" if rewritten.is_file() else ""
        raise UnavailableError(
            f"{path}: an engine runs only on an NVIDIA GPU, and this machine has no such GPU{instead}"
        )
    if module is None:
        raise UnavailableError(f"{path}: an engine needs TensorRT: pip install tensorrt, or tensorrt-rtx")
    loader = backend.Backend(module)
    log = backend.logger(loader.trt)
    # One runtime per engine: each has a registry of its own, and a registry takes one plugin library.
    runtime = loader.trt.Runtime(log)
    if (name := report.get("plugin_library")) is None:
        # The plugin library travels in the engine.
        runtime.engine_host_code_allowed = True
    else:
        loader.load_plugins(_library_beside(path, name), runtime.get_plugin_registry())
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        # Where TensorRT unpacks the library of an engine that carries one.
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")
        if runtime.engine_host_code_allowed and backend.mounted_noexec(temporary):
            raise UnavailableError(
                f"{path}: TensorRT unpacks its plugin library into {temporary}, which is mounted noexec, so that it "
                f"cannot be loaded ({log.last_errors()}); set TMPDIR to a folder on another file system, or build with "
                "--embed-plugins no"
            )
        raise UnavailableError(
            f"{origin}; {module} {loader.version} on this GPU cannot load it: {log.last_errors()}; build it again "
            "here, or install the version that built it"
        )
    raw = engine
    keeps = loader.has("runtime_cache") and hasattr(engine, "create_runtime_config")
    engine = EngineWithCache(engine, path) if keeps else engine
    if named_digest(engine.name) is not None:
        # It allocates by a module of `generate`, which needs this one.
        from trt_nvfp4.builder.tensorrt.bound_weights import with_weights

        engine = with_weights(engine, path)
    if getattr(raw, "streamable_weights_size", 0) > 0:  # built with --set weight-streaming=yes
        # Last: of the memory that the plugins' weights leave.
        raw.weight_streaming_budget_v2 = raw.get_weight_streaming_automatic_budget()
    return engine, loader
