"""Which plugin library is loaded with an engine that does not carry it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.tensorrt import backend, bound_weights, load, weights_file


class Registry:
    def __init__(self) -> None:
        self.all_creators: list[Any] = []
        self.loaded: list[str] = []

    def load_library(self, path: str) -> object:
        self.loaded.append(path)
        self.all_creators.append(SimpleNamespace(name="NVFP4Linear", plugin_namespace=""))
        return object()


class Runtime:
    engine_host_code_allowed = False
    name = "Unnamed Network 0"

    def __init__(self, *_: Any) -> None:
        self.registry = Registry()

    def get_plugin_registry(self) -> Registry:
        return self.registry

    def deserialize_cuda_engine(self, _: bytes) -> "Runtime":
        return self


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__version__="1.7", Runtime=Runtime, ILogger=object)
    monkeypatch.setattr(backend.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (12, 0))


def engine(folder: Path, library: object) -> Path:
    (folder / "a.engine").write_bytes(b"engine")
    report = {"backend": "tensorrt_rtx", "plugin_library": library}
    (folder / "a.report.json").write_text(json.dumps(report))
    return folder / "a.engine"


def test_the_library_beside_an_engine_is_loaded_into_its_runtime(tmp_path: Path) -> None:
    (tmp_path / "lib.so").touch()
    runtime, _ = load.load_engine(engine(tmp_path, "lib.so"))
    assert runtime.registry.loaded == [str(tmp_path / "lib.so")]
    assert not runtime.engine_host_code_allowed


def test_weights_are_streamed_within_the_budget_that_tensorrt_proposes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "streamable_weights_size", 100, raising=False)
    monkeypatch.setattr(Runtime, "get_weight_streaming_automatic_budget", lambda _: 40, raising=False)
    assert load.load_engine(engine(tmp_path, None))[0].weight_streaming_budget_v2 == 40


def test_the_budget_is_of_the_memory_that_plugins_weights_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set on TensorRT's engine, not on what stands for it."""
    order: list[str] = []
    monkeypatch.setattr(Runtime, "name", weights_file.ENGINE_NAME + "0" * 64)
    monkeypatch.setattr(Runtime, "streamable_weights_size", 100, raising=False)
    held: list[Any] = []

    def budget(_: Runtime) -> int:
        order.append("budget")
        return 40

    def with_weights(engine: Any, path: Path) -> SimpleNamespace:
        order.append("weights")
        held.append(engine)
        return SimpleNamespace()

    monkeypatch.setattr(Runtime, "get_weight_streaming_automatic_budget", budget, raising=False)
    monkeypatch.setattr(bound_weights, "with_weights", with_weights)
    load.load_engine(engine(tmp_path, None))
    assert order == ["weights", "budget"]
    assert held[0].weight_streaming_budget_v2 == 40


def test_an_engine_that_carries_the_library_may_run_it(tmp_path: Path) -> None:
    runtime, _ = load.load_engine(engine(tmp_path, None))
    assert runtime.engine_host_code_allowed
    assert not runtime.registry.loaded


@pytest.mark.parametrize("name", ["../lib.so", "/etc/lib.so", "..", 3])
def test_a_report_names_no_library_elsewhere(tmp_path: Path, name: object) -> None:
    with pytest.raises(ModelFaultError, match="expected the name of a file beside the engine"):
        load.load_engine(engine(tmp_path, name))


def test_an_engine_without_its_library(tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match=r"lib\.so does not lie beside it; copy the two together"):
        load.load_engine(engine(tmp_path, "lib.so"))


def test_a_library_is_registered_once(tmp_path: Path) -> None:
    registry = Registry()
    for _ in range(2):
        backend.Backend("tensorrt_rtx").load_plugins(tmp_path / "lib.so", registry)
    assert len(registry.loaded) == 1


_UNDER_NOEXEC = """
import os, sys
from pathlib import Path
from trt_nvfp4.builder.tensorrt import backend
print(backend.mounted_noexec(Path(sys.argv[1])), backend.mounted_noexec(Path(sys.argv[1]).parent))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a file system")
def test_a_mount_without_execution_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "noexec"
    folder.mkdir()
    mount = f"mount -t tmpfs -o noexec tmpfs {folder} && {sys.executable} -c '{_UNDER_NOEXEC}' {folder}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True)
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_an_engine_whose_library_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(backend, "mounted_noexec", lambda folder: folder == tmp_path)
    monkeypatch.setattr(Runtime, "deserialize_cuda_engine", lambda *_: None)
    with pytest.raises(BuilderError, match=rf"{tmp_path}, which is mounted noexec.*set TMPDIR.*--embed-plugins no"):
        load.load_engine(engine(tmp_path, None))
