"""Every TensorRT name and signature that the `tensorrt` back end uses exists in the real bindings of each version.

The back end runs against a recorder that notes which members of which classes it touches; the notes are looked up in
the bindings' own classes and docstrings. The bindings import over stub libraries; nothing is built with them.
"""

import errno
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.tensorrt import backend, build_script
from trt_nvfp4.common.replacing import replacing

VERSIONS = ["10.13.3.9", "10.16.1.11", "11.4.0.106"]
STUBS = {
    "nvinfer": [
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry",
        "getPluginRegistry",
    ],
    "nvonnxparser": ["createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"],
    "nvinfer_plugin": ["initLibNvInferPlugins"],
}
# What the members give, where the back end goes on with it.
GIVES = {
    "Builder.create_network": "INetworkDefinition",
    "Builder.create_builder_config": "IBuilderConfig",
    "INetworkDefinition.get_input": "ITensor",
    "INetworkDefinition.get_layer": "ILayer",
    "ILayer.get_input": "ITensor",
    "Builder.create_optimization_profile": "IOptimizationProfile",
    "Builder.build_serialized_network": "IHostMemory",
    "OnnxParser.get_error": "ParserError",
    "IBuilderConfig.create_timing_cache": "ITimingCache",
    "IBuilderConfig.get_timing_cache": "ITimingCache",
    "IBuilderConfig.add_optimization_profile": 0,
    "ITimingCache.serialize": b"cache",
    "ParserError.desc": "creator && Plugin not found",
    "Runtime.deserialize_cuda_engine": "ICudaEngine",
    "ICudaEngine.create_engine_inspector": "EngineInspector",
    "EngineInspector.get_engine_information": '{"Layers": []}',
    "module.get_plugin_registry": "IPluginRegistry",
}
# Of those that are no methods.
PROPERTIES = {
    "INetworkDefinition.num_inputs": 1,
    "ITensor.is_shape_tensor": False,
    "ITensor.shape": (-1, 8),
    "INetworkDefinition.num_layers": 1,
    "ILayer.type": 1,
    "ILayer.name": "product",
    "OnnxParser.num_errors": 1,
    "IPluginRegistry.all_creators": (),
}


class Recorder:
    """Stands for an object of a TensorRT class and notes what is done with it."""

    def __init__(self, kind: str, notes: dict[str, int | None]) -> None:
        self.__dict__.update(kind=kind, notes=notes)

    def __getattr__(self, name: str) -> Any:
        member = f"{self.kind}.{name}"
        self.notes.setdefault(member, None)
        if member in PROPERTIES:
            return PROPERTIES[member]
        gives = GIVES.get(member, True)

        def call(*arguments: Any) -> Any:
            self.notes[member] = len(arguments)
            if isinstance(gives, str) and gives[0].isupper() and gives.isidentifier():
                return Recorder(gives, self.notes)
            return gives

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        self.notes.setdefault(f"{self.kind}.{name}", None)


class Module:
    """Stands for the `tensorrt` module."""

    def __init__(self, version: str, parses: bool) -> None:
        self.__version__ = version
        self.notes: dict[str, int | None] = {}
        self.parses = parses

        class ILogger:
            ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"

        class IProgressMonitor:
            pass

        self.ILogger, self.IProgressMonitor = ILogger, IProgressMonitor

    def __getattr__(self, name: str) -> Any:
        if name == "get_plugin_registry":
            self.notes["module.get_plugin_registry"] = 0
            return lambda: Recorder("IPluginRegistry", self.notes)
        if name in ("Builder", "OnnxParser", "Runtime"):
            return lambda *arguments: self.instance(name, len(arguments))
        return Members(name, self.notes)

    def instance(self, name: str, count: int) -> Recorder:
        self.notes[f"{name}.__init__"] = count
        made = Recorder(name, self.notes)
        if name == "OnnxParser" and not self.parses:
            self.notes["OnnxParser.parse_from_file"] = 1
            made.__dict__["parse_from_file"] = lambda path: False
        return made


class Members:
    """Stands for an enumeration."""

    __members__: ClassVar = {"MATRIX_MULTIPLY": 1}

    def __init__(self, name: str, notes: dict[str, int | None]) -> None:
        self.name, self.notes = name, notes

    def __getattr__(self, member: str) -> int:
        self.notes[f"{self.name}.{member}"] = None
        return 1


def used_members(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """Member -> number of arguments (None: not called), over a build that works and one whose model is refused."""
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (11, 0))
    # The back end sets it for good; monkeypatch puts it back.
    monkeypatch.setenv("__LUNOWUD", "")
    job = job_in(tmp_path)
    notes: dict[str, int | None] = {"ILogger.log": None, "IProgressMonitor.phase_start": None}
    notes |= {"IProgressMonitor.step_complete": None, "IProgressMonitor.phase_finish": None}
    notes |= {"ILogger.ERROR": None, "ILogger.INTERNAL_ERROR": None, "ILogger.WARNING": None}
    for parses in (True, False):
        module = Module(version, parses)
        monkeypatch.setattr(backend.importlib, "import_module", lambda name, module=module: module)
        engine = backend.Backend("tensorrt")
        if parses:
            engine.build(job, tmp_path / "plugins.so", lambda event: None)
            assert (tmp_path / "timing.cache").read_bytes() == b"cache"
        else:
            with pytest.raises(errors.BuilderError, match="plugin library does not provide it"):
                engine.build(job, tmp_path / "plugins.so", lambda event: None)
        notes |= module.notes
    return notes


def job_in(tmp_path: Path) -> build_script.Job:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"old")
    return build_script.Job(
        target="thor",
        arch="sm_110a",
        compute_capability=(11, 0),
        module="tensorrt",
        oldest_version="10.13",
        model=tmp_path / "model.onnx",
        engine=tmp_path / "out.engine",
        plugin_library=None,
        plugin_sources=None,
        embed_plugins=True,
        timing_cache=cache,
        profiles=[{"x": ((1, 16), (2, 16), (4, 16))}],
        attentions={},
        caches={},
        planned=[],
        checksums={},
        weights=build_script.Weights(tmp_path / "weights.safetensors", "0" * 64, ("w",)),
        weight_streaming=True,
    )


class Logging(Module):
    """Logs errors while it builds, and returns an engine all the same."""

    def __init__(self, *errors: str) -> None:
        super().__init__("11.4.0.106", parses=True)
        self.logged = errors

    def __getattr__(self, name: str) -> Any:
        return self.builder if name == "Builder" else super().__getattr__(name)

    def builder(self, log: Any) -> Recorder:
        def build(network: Any, config: Any) -> Recorder:
            for error in self.logged:
                log.log(self.ILogger.ERROR, error)
            return Recorder("IHostMemory", self.notes)

        made = self.instance("Builder", 1)
        made.__dict__["build_serialized_network"] = build
        return made


SKIPPED = "Error Code: 9: Skipping tactic 0x00000000000003e8 due to exception misaligned address"


def build_with(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of a build."""
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (11, 0))
    monkeypatch.setattr(backend.importlib, "import_module", lambda name: module)
    warnings: list[str] = backend.Backend("tensorrt").build(job_in(tmp_path), None, lambda event: None)[2]
    return warnings


@pytest.mark.parametrize("error", ["Error Code 1: Myelin (no kernel)", "Error Code 10: no tactic serves"])
def test_error_that_tensorrt_logged_fails_a_build_that_it_finished(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Logging(SKIPPED, error)
    with pytest.raises(errors.VerificationError, match=f"reported errors and went on: {re.escape(error)}$"):
        build_with(module, tmp_path, monkeypatch)
    assert (tmp_path / "timing.cache").read_bytes() == b"old"


def test_what_is_kept_of_the_log() -> None:
    log = backend.logger(Module("11.4.0.106", parses=True))
    for number in range(6):
        log.log("ERROR" if number % 2 else "INTERNAL_ERROR", f"e{number}")
    log.log("WARNING", "Make sure input ids has Int64 binding.")  # as it says of every token model
    log.log("WARNING", "w")
    log.log("VERBOSE", "v")
    log.log("VERBOSE", "Layers:\nall")
    assert log.last_errors() == "e2 | e3 | e4 | e5"
    assert (log.warnings, log.layers) == (["w"], "Layers:\nall")


@pytest.mark.parametrize(
    ("version", "capability", "off"),
    [("10.13.3.9", (11, 0), True), ("10.13.3.9", (10, 0), False), ("10.14.1.48", (11, 0), False)],
)
def test_a_fusion_is_off_where_it_miscompiles(
    version: str, capability: tuple[int, int], off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("__LUNOWUD", "")
    monkeypatch.delenv("__LUNOWUD")
    monkeypatch.setattr(driver, "local_compute_capability", lambda: capability)
    monkeypatch.setattr(backend.importlib, "import_module", lambda name: Module(version, parses=True))
    job = replace(job_in(tmp_path), compute_capability=capability)
    backend.Backend("tensorrt").build(job, None, lambda event: None)
    assert ("fc_h_fusion=off" in os.environ.get("__LUNOWUD", "")) == off


def test_tactics_that_failed_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT logs each as an error, and takes one of the others."""
    (warning,) = build_with(Logging(SKIPPED, SKIPPED), tmp_path, monkeypatch)
    assert warning == f"TensorRT skipped 2 tactics that failed; the first: {SKIPPED}"


def test_engine_is_not_lost_with_the_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(source: Path, destination: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))

    monkeypatch.setattr(backend.os, "replace", read_only)
    (warning,) = build_with(Logging(), tmp_path, monkeypatch)
    assert warning == f"{tmp_path / 'timing.cache'}: the timings could not be kept (Read-only file system)"


@pytest.fixture(scope="module")
def stub_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for major in (10, 11):
        for name, symbols in STUBS.items():
            source = "".join(f"void* {symbol}(void) {{ return 0; }}\n" for symbol in symbols)
            library = folder / f"lib{name}.so.{major}"
            command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, f"-Wl,-soname,{library.name}"]
            subprocess.run(command, input=source, text=True, check=True)
    return folder


def unpacked_bindings(version: str) -> Path:
    """The bindings' wheel, downloaded once and unpacked."""
    cache = Path(os.environ.get("TRT_NVFP4_CACHE") or Path.home() / ".cache" / "trt-nvfp4") / "bindings"
    folder = cache / f"{version}-{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        package = f"tensorrt-cu13-bindings=={version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "--dest", str(cache)]
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = next(cache.glob(f"*{version}-cp{sys.version_info.major}{sys.version_info.minor}*.whl"), None)
        if done.returncode or wheel is None:
            pytest.skip(f"cannot download {package}: {done.stderr.strip()[-200:]}")
        with replacing(folder) as temporary, zipfile.ZipFile(wheel) as archive:
            archive.extractall(temporary)
    return folder


LOOK_UP = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt
found = {}
for member in json.load(sys.stdin):
    kind, name = member.split(".")
    holder = trt if kind == "module" else getattr(trt, kind, None)
    entry = getattr(holder, name, None)
    found[member] = None if holder is None or not hasattr(holder, name) else (entry.__doc__ or "")
print(json.dumps([trt.__version__, found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_and_signature_exists(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub_libraries: Path
) -> None:
    bindings = unpacked_bindings(version)
    with monkeypatch.context() as patches:
        used = used_members(version, tmp_path, patches)
    assert len(used) > 30, "the recorder saw too little of the back end"
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, str(bindings)],
        input=json.dumps(list(used)),
        env={**os.environ, "LD_LIBRARY_PATH": str(stub_libraries)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    real_version, documented = json.loads(done.stdout)
    assert real_version == version
    missing = [member for member, doc in documented.items() if doc is None]
    assert not missing
    for member, count in used.items():
        if count is not None:
            assert accepts(documented[member], count), f"{member} with {count} arguments: {documented[member][:300]}"


def accepts(doc: str, count: int) -> bool:
    """Whether one of the signatures in a pybind docstring takes `count` arguments besides self."""
    signatures = re.findall(r"\((.*)\) ->", doc) or re.findall(r"\((.*)\)", doc)
    for signature in signatures:
        depth, parts = 0, [""]
        for character in signature:
            depth += (character in "[(") - (character in "])")
            if character == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += character
        parameters = [part.strip() for part in parts if part.strip() and not part.strip().startswith("self")]
        if any(part.startswith("*") for part in parameters):
            return True
        required = [part for part in parameters if "=" not in part]
        if len(required) <= count <= len(parameters):
            return True
    return False


def test_a_signature_with_fewer_parameters_is_refused() -> None:
    doc = "set_shape(self: T, input: str, min: Dims, opt: Dims = 3) -> None"
    assert accepts(doc, 2)
    assert accepts(doc, 3)
    assert not accepts(doc, 4)
    assert not accepts(doc, 1)
