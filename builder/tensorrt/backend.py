"""TensorRT and TensorRT-RTX, and in what they differ. The only module that imports them."""

from __future__ import annotations

import importlib
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import BuildFailedError, ModelFaultError, UnavailableError, UsageError, VerificationError
from trt_nvfp4.builder.tensorrt.job import Job
from trt_nvfp4.builder.tensorrt.network_checks import network_problems, products
from trt_nvfp4.builder.tensorrt.verify import Layer, layers_of_inspector, layers_of_log
from trt_nvfp4.builder.tensorrt.weights_file import ENGINE_NAME
from trt_nvfp4.common.json_text import read_bytes
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.plugins.compile.kernel_groups import all_groups, ops_of

# What differs between the versions served: feature -> module -> (first version that has it, first that no longer has).
# A module that is not named does not have the feature; everything else used below is the same in all versions.
NEVER: tuple[int, ...] = (sys.maxsize,)
FEATURES: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    # Builds for a GPU that is not there; `tensorrt` builds for the GPU in the machine.
    "set_compute_capability": {"tensorrt_rtx": ((1, 0), NEVER)},
    # TensorRT-RTX compiles kernels on the device at run time and keeps no timings.
    "timing_cache": {"tensorrt": ((10, 13), NEVER)},
    # Weights of TensorRT's own layers can stay in host memory.
    "weight_streaming": {"tensorrt": ((10, 13), NEVER)},
    # Kernels compiled at run time can be kept in a file.
    "runtime_cache": {"tensorrt_rtx": ((1, 7), NEVER)},
    # The parser opens lib<name>.so when it meets a plugin, while the wheel ships only lib<name>.so.1, and aborts.
    "parser_opens_unversioned_library": {"tensorrt_rtx": ((1, 0), NEVER)},
    # Myelin crashes where a plugin's network takes an input of no values.
    "empty_shapes": {"tensorrt": ((10, 16), NEVER), "tensorrt_rtx": ((1, 0), NEVER)},
    # The horizontal fusion of gate and up miscompiles at batch 1 on SM110.
    "gate_up_fusion_miscompiles_on_sm110": {"tensorrt": ((10, 13), (10, 14))},
}

# Creators of a plugin library, of which each has some.
OUR_PLUGINS = ops_of(all_groups())

# TensorRT's words for shapes that a model does not take.
_MISFIT = re.compile(r"\bk(MIN|OPT|MAX) values\b|inherently negative length")

Event = dict[str, Any]
Report = Callable[[Event], None]


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def mounted_noexec(folder: Path) -> bool:
    """Whether the folder's file system refuses to run what lies there, libraries included."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


class Backend:
    """TensorRT (`tensorrt`) or TensorRT-RTX (`tensorrt_rtx`) behind one interface; networks are strongly typed."""

    def __init__(self, module: str) -> None:
        try:
            self.trt: Any = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            install = "pip install tensorrt-rtx" if module == "tensorrt_rtx" else "pip install tensorrt"
            raise UnavailableError(f"cannot import {module} ({error}); install it: {install}") from error
        self.module = module
        self.version: str = self.trt.__version__

    def has(self, feature: str) -> bool:
        first, last = FEATURES[feature].get(self.module, (NEVER, NEVER))
        return first <= version_tuple(self.version) < last

    def load_plugins(self, library: Path, registry: Any = None) -> None:
        """Register the creators of a plugin library, unless `registry` has them already.

        Default: TensorRT's own registry, which is one per process. A runtime has a registry, too, for its engines.
        """
        registry = self.trt.get_plugin_registry() if registry is None else registry
        if any(creator.name in OUR_PLUGINS and creator.plugin_namespace == "" for creator in registry.all_creators):
            return
        if registry.load_library(str(library)) is None:
            here = platform.machine()
            raise BuildFailedError(
                f"{library}: lies on a file system mounted noexec, from which no library can be loaded; choose another "
                "folder for the engine"
                if mounted_noexec(library.parent)
                else f"{library}: TensorRT could not load this plugin library on {here}; if it lies in the cache, "
                "delete it there, and the next build makes it anew"
            )

    def build(
        self, job: Job, library: Path | None, report: Report
    ) -> tuple[Any, list[Layer], list[str], dict[str, bool]]:
        """Parse, build, list layers: (the serialized engine, its layers, warnings, the network's `products`)."""
        trt = self.trt
        log = logger(trt)
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        if job.weights is not None:
            # It stays the engine's name: an engine is loaded with these weights and no others.
            network.name = ENGINE_NAME + job.weights.digest
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        self._set_target(config, job)
        if library is not None:
            self.load_plugins(library)
            if job.embed_plugins:
                config.plugins_to_serialize = [str(library)]

        report({"event": "stage", "stage": "parse"})
        parser = trt.OnnxParser(network, log)
        if not parser.parse_from_file(str(job.model)):
            raise ModelFaultError(_parser_message(job.model, parser, log.errors))
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        if problems := list(network_problems(trt, network, job.attentions, job.caches)):
            raise VerificationError(f"{job.model}: TensorRT reads the model differently: {'; '.join(problems)}")
        values = {tensor.name for tensor in inputs if tensor.is_shape_tensor}
        static = {tensor.name for tensor in inputs if -1 not in tuple(tensor.shape)}
        if without := sorted(values - {name for profile in job.profiles for name in profile}):
            raise ModelFaultError(
                f"{job.model}: the values of input {without[0]!r} are a shape of unknown range; make it a "
                "constant of the model"
            )
        if not self.has("empty_shapes") and (empty := _empty(job.profiles)):
            raise UsageError(
                f"{self.module} {self.version} fails on devices with empty inputs next to plugins, and the smallest "
                f"shape of {empty!r} is empty; give --min-shapes without a 0, or use 10.16"
            )
        for shapes_of in filter(None, job.profiles):
            profile = builder.create_optimization_profile()
            for name, (low, opt, high) in shapes_of.items():
                if name in static - values:
                    continue  # TensorRT does not take these values as a shape
                set_range = profile.set_shape_input if name in values else profile.set_shape
                try:
                    set_range(name, low, opt, high)
                except RuntimeError as error:
                    raise UsageError(
                        f"TensorRT refused the shapes {low}, {opt}, {high} of {name!r}: {error}"
                    ) from error
            if config.add_optimization_profile(profile) < 0:
                raise UsageError(f"TensorRT refused the shapes {shapes_of}: {log.last_errors()}")
        if job.weight_streaming:
            if not self.has("weight_streaming"):
                raise UsageError(
                    f"--set weight-streaming=yes: {self.module} {self.version} does not stream weights; leave it out"
                )
            config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        cache = self._timing_cache(config, job, log)

        report({"event": "stage", "stage": "build"})
        config.progress_monitor = _monitor(trt, report)
        # Minutes may pass without a return to Python: let signals end the process. Nothing is written until later.
        handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
        parsed = len(log.errors)
        engine = builder.build_serialized_network(network, config)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # TensorRT only warns about bad min/max shapes; the engine then fails at run time.
        said = (*log.errors, *log.warnings)
        if misfit := next((text for text in said if _MISFIT.search(text)), None):
            raise UsageError(
                f"{job.model}: does not take all shapes of the profile {_shown(job.profiles)}: {misfit}; give others "
                "with --min-shapes, --opt-shapes and --max-shapes"
            )
        if engine is None:
            raise BuildFailedError(f"TensorRT built no engine: {log.last_errors()}")
        # A tactic that failed leaves the others.
        skipped = [error for error in log.errors[parsed:] if "Skipping tactic" in error]
        if others := [error for error in log.errors[parsed:] if error not in skipped]:
            raise VerificationError(f"TensorRT reported errors and went on: {' | '.join(others[:4])}")
        if skipped:
            log.warnings.append(f"TensorRT skipped {len(skipped)} tactics that failed; the first: {skipped[0]}")
        if cache is not None and job.timing_cache is not None:
            try:
                with replacing(job.timing_cache) as temporary:
                    temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
            except OSError as error:
                log.warnings.append(f"{job.timing_cache}: the timings could not be kept ({error.strerror})")
        layers = layers_of_log(log.layers) if log.layers else self._inspect(engine, log)
        return engine, layers, log.warnings, products(trt, network)

    def _set_target(self, config: Any, job: Job) -> None:
        major, minor = job.compute_capability
        if self.has("set_compute_capability"):
            name = f"SM{major}{minor}"
            capability = self.trt.ComputeCapability.__members__.get(name)
            config.num_compute_capabilities = 1
            if capability is None or not config.set_compute_capability(capability, 0):
                raise UnavailableError(f"{self.module} {self.version} builds no engine for {name} ({job.target})")
        elif (here := driver.local_compute_capability()) != (major, minor):
            found = "no GPU" if here is None else f"a GPU of compute capability {here[0]}.{here[1]}"
            raise UnavailableError(
                f"{self.module} builds for the GPU in the machine: {job.target} is {major}.{minor}, here is {found}"
            )
        if self.has("gate_up_fusion_miscompiles_on_sm110") and (major, minor) == (11, 0):
            os.environ.setdefault("__LUNOWUD", "-peep:fc_h_fusion=off")

    def _timing_cache(self, config: Any, job: Job, log: Any) -> Any:
        if job.timing_cache is None:
            return None
        if not self.has("timing_cache"):
            log.warnings.append(f"{self.module} keeps no timing cache: {job.timing_cache} is not used")
            return None
        try:
            kept = read_bytes(job.timing_cache)
        except (OSError, ValueError) as error:
            raise UsageError(f"{job.timing_cache}: cannot be read ({error}); name another file") from error
        cache = config.create_timing_cache(kept)
        if cache is None or not config.set_timing_cache(cache, False):
            raise UsageError(f"{job.timing_cache} is not a timing cache of {self.module} {self.version}; delete it")
        return cache

    def _inspect(self, engine: Any, log: Any) -> list[Layer]:
        """Layers by the engine inspector, where the builder's log does not list them; needs the target's GPU."""
        loaded = self.trt.Runtime(log).deserialize_cuda_engine(engine)
        if loaded is None:
            return []
        inspector = loaded.create_engine_inspector()
        return layers_of_inspector(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))


def _empty(profiles: list[dict[str, tuple[tuple[int, ...], ...]]]) -> str | None:
    """An input whose smallest shape has no values."""
    return next((name for shapes in profiles for name, (low, *_) in shapes.items() if 0 in low), None)


def _shown(profiles: list[dict[str, tuple[tuple[int, ...], ...]]]) -> str:
    return " or ".join(map(str, profiles))


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
