#!/usr/bin/env python3
"""Build an engine from a manifest with TensorRT or TensorRT-RTX, and check that it holds what was planned.

The only module that imports TensorRT. It needs Python and one of the two packages, nothing else: every build runs it as
a script in a process of its own (so that the weights' memory ends with it), and a bundle carries it under the name
`build_engine.py`. What is built on a device is therefore built and checked by the same code as what is built here.

usage: build_engine.py [--manifest manifest.json] [-o OUT.engine] [--events]

Exit codes: 0 done, 2 usage, 3 the model is at fault, 4 target or back end unavailable, 5 verification failed,
6 build failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USAGE, MODEL_AT_FAULT, UNAVAILABLE, VERIFICATION_FAILED, BUILD_FAILED, INTERRUPTED = 2, 3, 4, 5, 6, 130

# What differs between the versions served: feature -> module -> (first version that has it, first that no longer has).
# A module that is not named does not have the feature; everything else used below is the same in all versions.
NEVER: tuple[int, ...] = (sys.maxsize,)
FEATURES: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    # Builds for a GPU that is not there; `tensorrt` builds for the GPU in the machine.
    "set_compute_capability": {"tensorrt_rtx": ((1, 0), NEVER)},
    # TensorRT-RTX compiles kernels on the device at run time and keeps no timings.
    "timing_cache": {"tensorrt": ((10, 13), NEVER)},
    # The parser opens lib<name>.so when it meets a plugin, while the wheel ships lib<name>.so.1 alone, and aborts.
    "parser_opens_unversioned_library": {"tensorrt_rtx": ((1, 0), NEVER)},
    # The horizontal fusion of gate and up miscompiles at batch 1 on SM110.
    "gate_up_fusion_miscompiles_on_sm110": {"tensorrt": ((10, 13), (10, 14))},
}

Event = dict[str, Any]
Report = Callable[[Event], None]


class EngineError(Exception):
    """A failure with the exit code that says whose it is."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Yield a temporary path beside `destination`; rename it over `destination` on success, remove it otherwise."""
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, destination)
    except OSError as error:
        # Writes name no file.
        if error.filename in (None, str(temporary)):
            error.filename = str(destination)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def describe(error: OSError) -> str:
    """What failed, and where; for a full or read-only disk, what to do."""
    advice = {
        errno.ENOSPC: "; free some space, or write elsewhere with -o",
        errno.EACCES: "; choose a folder you can write to with -o",
        errno.EROFS: "; choose a folder you can write to with -o",
    }.get(error.errno or 0, "")
    # Two files are a copy's, and the disk that is full is the second's.
    file = error.filename2 or error.filename or ""
    return f"{file}: {error.strerror or error}{advice}".lstrip(": ")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def local_compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the first NVIDIA GPU in this machine, None where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0:
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0) or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0):
        return None
    return major.value, minor.value


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# --- what TensorRT built -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One layer of the built engine: its type, the data types it reads, the ONNX nodes it came from."""

    name: str
    kind: str
    datatypes: frozenset[str]
    nodes: frozenset[str]

    @property
    def is_plugin(self) -> bool:
        return self.kind == "custom_layer" or self.kind.lower().startswith("plugin")


def _onnx_nodes(metadata: str) -> frozenset[str]:
    # Unit separators stand between the entries.
    return frozenset(part.rstrip("\x1e\x1f").removesuffix("]") for part in metadata.split("[ONNX Layer: ")[1:])


def layers_of_log(message: str) -> list[Layer]:
    """Read the builder's verbose message "Layers:" (ProfilingVerbosity.DETAILED), one layer per line."""
    layers = []
    for line in message.splitlines()[1:]:
        found = re.match(
            r"Name: (.*?), LayerType: (\w+), Inputs: (.*), Outputs: (.*?), TacticName: .*Metadata: (.*)", line
        )
        if found:
            name, kind, inputs, _, metadata = found.groups()
            datatypes = frozenset(re.findall(r"Datatype: (\w+)", inputs))
            layers.append(Layer(name, kind, datatypes, _onnx_nodes(metadata)))
    return layers


def layers_of_inspector(text: str) -> list[Layer]:
    """Read the engine inspector's JSON."""
    layers = []
    for entry in json.loads(text).get("Layers", []):
        tensors = [*entry.get("Inputs", []), *entry.get("Constants", [])]
        described = " ".join(str(tensor.get("Datatype") or tensor.get("Format/Datatype", "")) for tensor in tensors)
        datatypes = frozenset(re.findall(r"\w+", described))
        nodes = _onnx_nodes(entry.get("Metadata", "")) | {entry["Name"]}
        layers.append(Layer(entry["Name"], entry["LayerType"], datatypes, nodes))
    return layers


# How TensorRT's layer lists spell the precision a GEMM reads its operands in.
PLUGINS = {"nvfp4": "nvfp4 plugin", "fp8_plugin": "fp8 plugin"}
DATATYPES = {"native_nvfp4": {"FP4E2M1", "FP4"}, "fp8": {"FP8"}, "bf16": {"BFloat16", "BF16"}, "fp16": {"Half", "FP16"}}


def check_layers(layers: list[Layer], planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each planned subgraph.

    `planned`: name, decision (nvfp4 | fp8_plugin | native | native_nvfp4 | fp8 | bf16 | fp16) and `engine_nodes`, the
    ONNX nodes that carry it: plugin nodes for nvfp4 and fp8_plugin, TRT_MoE for native, matrix products otherwise.
    Returns name, realized and problem (None when it is as planned).
    """
    results = []
    for subgraph in planned:
        decision, nodes = subgraph["decision"], subgraph["engine_nodes"]
        problems = []
        if not nodes:
            problems.append("no node carries it")
        for node in nodes:
            mine = [layer for layer in layers if node in layer.nodes]
            if decision in PLUGINS:
                plugins = [layer for layer in mine if layer.is_plugin]
                if len(plugins) != 1:
                    problems.append(f"node {node!r}: {len(plugins)} plugin layers in the engine, expected 1")
            elif decision == "native":
                if not mine:
                    problems.append(f"node {node!r}: TensorRT's MoE layer is not in the engine")
            elif not any(layer.datatypes & DATATYPES[decision] for layer in mine):
                seen = sorted(set().union(*(layer.datatypes for layer in mine))) if mine else "no layer"
                problems.append(f"node {node!r}: expected a layer that reads {decision}, TensorRT built {seen}")
        realized = "missing" if problems else PLUGINS.get(decision, decision)
        results.append({"name": subgraph["name"], "realized": realized, "problem": "; ".join(problems) or None})
    return results


# --- the back end --------------------------------------------------------------------------------------------------


class Backend:
    """TensorRT (`tensorrt`) or TensorRT-RTX (`tensorrt_rtx`) behind one interface; networks are strongly typed."""

    def __init__(self, module: str) -> None:
        try:
            self.trt: Any = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            install = "pip install tensorrt-rtx" if module == "tensorrt_rtx" else "pip install tensorrt"
            raise EngineError(UNAVAILABLE, f"cannot import {module} ({error}); install it: {install}") from error
        self.module = module
        self.version: str = self.trt.__version__

    def has(self, feature: str) -> bool:
        first, last = FEATURES[feature].get(self.module, (NEVER, NEVER))
        return first <= version_tuple(self.version) < last

    def load_plugins(self, library: Path) -> None:
        """Register the creators of a plugin library, once per process."""
        registry = self.trt.get_plugin_registry()
        if registry.load_library(str(library)) is None:
            here = platform.machine()
            raise EngineError(
                BUILD_FAILED,
                f"{library}: TensorRT could not load this plugin library on {here}; if it lies in the cache, delete it "
                "there, and the next build makes it anew",
            )

    def build(self, job: Job, library: Path | None, report: Report) -> tuple[Any, list[Layer], list[str]]:
        """Parse, build, list layers: (the serialized engine, its layers, warnings)."""
        trt = self.trt
        log = logger(trt)
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        self._set_target(config, job)
        if library is not None:
            self.load_plugins(library)
            config.plugins_to_serialize = [str(library)]

        report({"event": "stage", "stage": "parse"})
        parser = trt.OnnxParser(network, log)
        if not parser.parse_from_file(str(job.model)):
            raise EngineError(MODEL_AT_FAULT, _parser_message(job.model, parser, log.errors))
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        if shapes := [tensor.name for tensor in inputs if tensor.is_shape_tensor]:
            raise EngineError(
                MODEL_AT_FAULT,
                f"{job.model}: the values of input {shapes[0]!r} are a shape, whose range nothing says; make it a "
                "constant of the model",
            )
        if job.profiles:
            profile = builder.create_optimization_profile()
            for name, (low, typical, high) in job.profiles.items():
                try:
                    profile.set_shape(name, low, typical, high)
                except RuntimeError as error:
                    raise EngineError(
                        USAGE, f"TensorRT refused the shapes {low}, {typical}, {high} of {name!r}: {error}"
                    ) from error
            if config.add_optimization_profile(profile) < 0:
                raise EngineError(USAGE, f"TensorRT refused the shapes {job.profiles}: {log.last_errors()}")
        cache = self._timing_cache(config, job, log)

        report({"event": "stage", "stage": "build"})
        config.progress_monitor = _monitor(trt, report)
        # Minutes may pass without a return to Python: let Ctrl-C end the process. Nothing is written until later.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
        parsed = len(log.errors)
        engine = builder.build_serialized_network(network, config)
        signal.signal(signal.SIGINT, interrupt)
        if engine is None:
            raise EngineError(BUILD_FAILED, f"TensorRT built no engine: {log.last_errors()}")
        # A tactic that failed leaves the others.
        skipped = [error for error in log.errors[parsed:] if "Skipping tactic" in error]
        if others := [error for error in log.errors[parsed:] if error not in skipped]:
            raise EngineError(VERIFICATION_FAILED, f"TensorRT reported errors and went on: {' | '.join(others[:4])}")
        if skipped:
            log.warnings.append(f"TensorRT skipped {len(skipped)} tactics that failed; the first: {skipped[0]}")
        if cache is not None and job.timing_cache is not None:
            try:
                with replacing(job.timing_cache) as temporary:
                    temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
            except OSError as error:
                log.warnings.append(f"{job.timing_cache}: the timings could not be kept ({error.strerror})")
        layers = layers_of_log(log.layers) if log.layers else self._inspect(engine, log)
        return engine, layers, log.warnings

    def _set_target(self, config: Any, job: Job) -> None:
        major, minor = job.compute_capability
        if self.has("set_compute_capability"):
            name = f"SM{major}{minor}"
            capability = self.trt.ComputeCapability.__members__.get(name)
            config.num_compute_capabilities = 1
            if capability is None or not config.set_compute_capability(capability, 0):
                raise EngineError(
                    UNAVAILABLE, f"{self.module} {self.version} builds no engine for {name} ({job.target})"
                )
        elif (here := local_compute_capability()) != (major, minor):
            found = "no GPU" if here is None else f"a GPU of compute capability {here[0]}.{here[1]}"
            raise EngineError(
                UNAVAILABLE,
                f"{self.module} builds for the GPU in the machine: {job.target} is {major}.{minor}, here is {found}",
            )
        if self.has("gate_up_fusion_miscompiles_on_sm110") and (major, minor) == (11, 0):
            os.environ.setdefault("__LUNOWUD", "-peep:fc_h_fusion=off")

    def _timing_cache(self, config: Any, job: Job, log: Any) -> Any:
        if job.timing_cache is None:
            return None
        if not self.has("timing_cache"):
            log.warnings.append(f"{self.module} keeps no timing cache: {job.timing_cache} is not used")
            return None
        cache = config.create_timing_cache(job.timing_cache.read_bytes() if job.timing_cache.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise EngineError(
                USAGE, f"{job.timing_cache} is no timing cache of {self.module} {self.version}; delete it"
            )
        return cache

    def _inspect(self, engine: Any, log: Any) -> list[Layer]:
        """Layers by the engine inspector, where the builder's log does not list them; needs the target's GPU."""
        loaded = self.trt.Runtime(log).deserialize_cuda_engine(engine)
        if loaded is None:
            return []
        inspector = loaded.create_engine_inspector()
        return layers_of_inspector(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))


def logger(trt: Any) -> Any:
    """A TensorRT logger that keeps errors, warnings and the list of layers."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = ""
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING and "has Int64 binding" not in message:
                self.warnings.append(message)
            elif message.startswith("Layers:"):
                self.layers = message

        def last_errors(self) -> str:
            return " | ".join(self.errors[-4:]) or "it gave no reason"

    return Log()


def _monitor(trt: Any, report: Report) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.root = ""
            self.steps = 0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.root, self.steps = phase, steps

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self.root:
                report({"event": "step", "phase": phase, "step": step + 1, "steps": self.steps})
            return True

        def phase_finish(self, phase: str) -> None:
            if phase == self.root:
                report({"event": "step", "phase": phase, "step": self.steps, "steps": self.steps})

    return Monitor()


def _parser_message(model: Path, parser: Any, logged: list[str]) -> str:
    lines = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_operator() else ""
        if "Plugin not found" in error.desc():
            lines.append(f"{where}TensorRT has no such operator and the plugin library does not provide it")
        else:
            lines.append(where + error.desc())
    return f"{model}: TensorRT cannot read this model: " + ("; ".join(lines) or " | ".join(logged[-4:]))


# --- the script ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A manifest with its paths made absolute; see `bundle.py` for what writes it."""

    target: str
    arch: str
    compute_capability: tuple[int, int]
    module: str
    oldest_version: str
    model: Path
    engine: Path
    plugin_library: Path | None
    plugin_sources: Path | None
    timing_cache: Path | None
    profiles: dict[str, tuple[tuple[int, ...], ...]]
    planned: list[dict[str, Any]]
    checksums: dict[Path, str]

    @staticmethod
    def read(manifest: Path, output: Path | None) -> Job:
        try:
            data = json.loads(manifest.read_text())
            folder = manifest.resolve().parent
            capability = tuple(data["compute_capability"])
            module = _choose_module(data["modules"], capability)

            def inside(name: str | None) -> Path | None:
                return None if name is None else folder / name

            return Job(
                target=data["target"],
                arch=data["arch"],
                compute_capability=capability,
                module=module,
                oldest_version=data["modules"][module],
                model=folder / data["model"],
                engine=(output or folder / data["engine"]).absolute(),
                plugin_library=inside(data["plugin_library"]),
                plugin_sources=inside(data["plugin_sources"]),
                timing_cache=inside(data["timing_cache"]),
                profiles={name: tuple(tuple(shape) for shape in shapes) for name, shapes in data["profiles"].items()},
                planned=data["planned"],
                checksums={folder / name: digest for name, digest in data["checksums"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(USAGE, f"{manifest}: not a manifest of trt-nvfp4 ({error!r})") from error


def _check_output(job: Job, manifest: Path) -> None:
    """Refuse, before minutes of building, to write over what the bundle holds or where nothing can be written."""
    if job.engine.exists() and not job.engine.is_file():
        raise EngineError(
            USAGE, f"{job.engine}: is no file (a folder, or a device), and would be replaced; choose another -o"
        )
    own = [manifest, Path(__file__), job.model, job.plugin_library, job.timing_cache, *job.checksums]
    if any(file is not None and file.resolve() == job.engine.resolve() for file in own):
        raise EngineError(USAGE, f"{job.engine}: would be written over, and belongs to the bundle; choose another -o")
    folder = job.engine.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EngineError(BUILD_FAILED, f"{folder}: cannot be written to; choose another folder with -o")


def report_file(engine: Path) -> Path:
    """Where the report of an engine lies; names hold dots of their own: Qwen2.5-7B."""
    base = engine.stem if engine.suffix in (".engine", ".plan") else engine.name
    return engine.with_name(base + ".report.json")


def _choose_module(modules: dict[str, str], compute_capability: tuple[int, ...]) -> str:
    """Of the acceptable modules (name -> oldest version) the first that serves; else the first that is installed, which
    says what is amiss, and else the first."""
    installed = [name for name in modules if importlib.util.find_spec(name) is not None]
    serving = (name for name in installed if _serves(name, modules[name], compute_capability))
    return next(serving, (installed or list(modules))[0])


def _serves(module: str, oldest: str, compute_capability: tuple[int, ...]) -> bool:
    try:
        # Not imported: one process holds one TensorRT.
        version = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        version = oldest  # its import will tell
    here = module in FEATURES["set_compute_capability"] or local_compute_capability() == compute_capability
    return here and version_tuple(version) >= version_tuple(oldest)


def _offer_unversioned_library(module: str) -> None:
    """Restart with a folder on the loader's path that holds the unversioned name which the parser opens.

    A link in the cache and not in site-packages: that may be read-only. The loader reads its path at start only.
    """
    package = importlib.util.find_spec(f"{module}_libs")
    if module not in FEATURES["parser_opens_unversioned_library"] or package is None:
        return
    folder = Path((package.submodule_search_locations or [""])[0])
    versioned = next(folder.glob(f"lib{module}.so.*"), None)
    if versioned is None or (folder / f"lib{module}.so").exists() or "TRT_NVFP4_LIBRARY_LINKS" in os.environ:
        return
    try:
        named = os.environ.get("TRT_NVFP4_CACHE")
        cache = Path(named).expanduser() if named else Path.home() / ".cache" / "trt-nvfp4"
        links = cache / "links" / hashlib.sha256(str(versioned).encode()).hexdigest()[:16]
        links.mkdir(parents=True, exist_ok=True)
        with replacing(links / f"lib{module}.so") as temporary:
            temporary.symlink_to(versioned)
    except (OSError, RuntimeError):  # users of containers may have no home
        links = Path(tempfile.mkdtemp(prefix="trt-nvfp4-links-"))
        (links / f"lib{module}.so").symlink_to(versioned)
    environment = dict(os.environ, TRT_NVFP4_LIBRARY_LINKS=str(links))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(links), os.environ.get("LD_LIBRARY_PATH")]))
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _build_library(job: Job, report: Report) -> Path | None:
    """The plugin library; compiled here where the bundle carries its sources, with nvcc found on the device."""
    if job.plugin_sources is None:
        return job.plugin_library
    report({"event": "stage", "stage": "compile"})
    sys.path.insert(0, str(job.plugin_sources))
    try:
        library: Any = importlib.import_module("trt_nvfp4.plugins.library")
        toolchain: Any = importlib.import_module("trt_nvfp4.plugins.toolchain")
    except ModuleNotFoundError as error:
        raise EngineError(
            UNAVAILABLE,
            f"compiling the plugin library needs the package {error.name}; install it: pip install {error.name}",
        ) from error
    try:
        return Path(library.build_library(job.arch))
    except toolchain.ToolchainError as error:
        raise EngineError(UNAVAILABLE, str(error)) from error


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


def run(job: Job, report: Report) -> dict[str, Any]:
    """Build the engine of `job`, check it, write it; returns the result that goes into the report."""
    started = time.monotonic()
    timings: dict[str, float] = {}

    def lap(stage: str) -> None:
        timings[stage] = round(time.monotonic() - started - sum(timings.values()), 3)

    for path, digest in job.checksums.items():
        if not path.exists() or sha256(path) != digest:
            raise EngineError(USAGE, f"{path}: missing or changed since the bundle was written; copy the bundle again")
    backend = Backend(job.module)
    if version_tuple(backend.version) < version_tuple(job.oldest_version):
        raise EngineError(
            UNAVAILABLE, f"{job.module} {backend.version} is too old for {job.target}: {job.oldest_version} or newer"
        )
    library = _build_library(job, report)
    lap("prepare")
    try:
        engine, layers, warnings = backend.build(job, library, report)
    except EngineError as error:
        if reason := _plugin_error(library):
            raise EngineError(error.exit_code, f"{error} (a plugin said: {reason})") from error
        raise
    lap("build")

    report({"event": "stage", "stage": "check"})
    if not layers:
        raise EngineError(VERIFICATION_FAILED, "TensorRT listed no layers: what it built cannot be checked")
    if reason := _plugin_error(library):
        raise EngineError(VERIFICATION_FAILED, f"a plugin failed during the build and TensorRT went on: {reason}")
    realized = check_layers(layers, job.planned)
    short = [entry for entry in realized if entry["problem"]]
    if short:
        listed = "; ".join(f"{entry['name']}: {entry['problem']}" for entry in short)
        raise EngineError(VERIFICATION_FAILED, f"the engine is not what was planned: {listed}")
    size = engine.nbytes
    if size == 0:
        raise EngineError(VERIFICATION_FAILED, "TensorRT returned an empty engine and no error")
    with replacing(job.engine) as temporary:
        with temporary.open("wb") as file:
            file.write(memoryview(engine))
            file.flush()
            os.fsync(file.fileno())
        del engine
        if temporary.stat().st_size != size:
            raise EngineError(VERIFICATION_FAILED, f"{job.engine}: wrote {temporary.stat().st_size} of {size} bytes")
    lap("check")
    return {
        "target": job.target,
        "backend": job.module,
        "engine": str(job.engine),
        "engine_bytes": size,
        "engine_layers": len(layers),
        "plugin_layers": sum(layer.is_plugin for layer in layers),
        "subgraphs": realized,
        "timings_s": timings,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {job.module: backend.version, "python": platform.python_version()},
        "warnings": list(dict.fromkeys(warnings)),
    }


def _print_text(event: Event) -> None:
    if event["event"] == "stage":
        print(f"{event['stage']} ...", file=sys.stderr, flush=True)
    elif event["event"] == "step":
        print(f"  {event['phase']}: {event['step']}/{event['steps']}", file=sys.stderr, flush=True)


def _print_events(event: Event) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and check the TensorRT engine of this bundle.")
    parser.add_argument("--manifest", type=Path, default=Path(__file__).resolve().parent / "manifest.json")
    parser.add_argument("-o", "--output", type=Path, help="engine file (default: as the manifest says, beside it)")
    parser.add_argument("--events", action="store_true", help="progress and result as JSON lines on stdout")
    arguments = parser.parse_args()
    report = _print_events if arguments.events else _print_text
    try:
        job = Job.read(arguments.manifest, arguments.output)
        _check_output(job, arguments.manifest)
        _offer_unversioned_library(job.module)
        result = run(job, report)
        if arguments.events:
            report({"event": "result", **result})
        else:
            with replacing(report_file(job.engine)) as temporary:
                temporary.write_text(json.dumps(result, indent=2) + "\n")
            print(f"{job.engine}: {result['engine_bytes']} bytes, {result['plugin_layers']} plugin layers, as planned")
        return 0
    except (EngineError, OSError) as error:
        code, text = (BUILD_FAILED, describe(error)) if isinstance(error, OSError) else (error.exit_code, str(error))
        if arguments.events:
            report({"event": "error", "exit_code": code, "message": text})
        else:
            print(f"error: {text}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
