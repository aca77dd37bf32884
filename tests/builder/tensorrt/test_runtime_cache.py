"""The file of compiled kernels beside an engine, with stand-ins for TensorRT-RTX's objects."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from trt_nvfp4.builder.tensorrt.runtime_cache import SUFFIX, EngineWithCache

VERSION = b"driver 1;"


class Cache:
    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, blob: bytes) -> bool:
        if blob.startswith(VERSION):
            self.kernels = blob.removeprefix(VERSION)
        return blob.startswith(VERSION)

    def serialize(self) -> bytes:
        return VERSION + self.kernels


class Config:
    def __init__(self) -> None:
        self.cache: Cache | None = None

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Engine:
    """Compiles where the cache has nothing."""

    num_io_tensors = 3
    compiled = 0

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Config) -> object:
        assert config.cache is not None
        if not config.cache.kernels:
            self.compiled += 1
            config.cache.kernels = b"kernels"
        return object()


def run(path: Path) -> int:
    """How often kernels were compiled by two contexts of one engine."""
    engine = Engine()
    loaded: Any = EngineWithCache(engine, path)
    assert loaded.num_io_tensors == 3
    loaded.create_execution_context()
    loaded.create_execution_context()
    del loaded
    gc.collect()
    return engine.compiled


@pytest.mark.parametrize("earlier", [None, b"driver 0;other"], ids=["no cache", "one that is refused"])
def test_kernels_are_compiled_once(earlier: bytes | None, tmp_path: Path) -> None:
    path, file = tmp_path / "a.engine", tmp_path / f"a.engine{SUFFIX}"
    if earlier is not None:
        file.write_bytes(earlier)
    assert [run(path), run(path)] == [1, 0]
    assert file.read_bytes() == VERSION + b"kernels"


@pytest.mark.parametrize("poison", ["a pipe", "a device", "a terabyte", "garbage"])
def test_a_cache_that_is_none_is_written_anew(poison: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.engine{SUFFIX}"
    if poison == "a pipe":
        os.mkfifo(file)
    elif poison == "a device":
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes(os.urandom(100))
        os.truncate(file, 1 << 40 if poison == "a terabyte" else 100)
    assert [run(tmp_path / "a.engine"), run(tmp_path / "a.engine")] == [1, 0]
    assert file.read_bytes() == VERSION + b"kernels"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refused)
    assert run(tmp_path / "a.engine") == 1
    assert not (tmp_path / f"a.engine{SUFFIX}").exists()


def test_the_calls_are_those_of_tensorrt_rtx() -> None:
    """Without a GPU there is no engine to call them on: names and arguments are compared with the bindings'."""
    rtx = pytest.importorskip("tensorrt_rtx")
    calls = {
        rtx.ICudaEngine: {"create_runtime_config": "IRuntimeConfig", "create_execution_context": "IRuntimeConfig"},
        rtx.IRuntimeConfig: {"create_runtime_cache": "IRuntimeCache", "set_runtime_cache": "IRuntimeCache"},
        rtx.IRuntimeCache: {"deserialize": "-> bool", "serialize": "IHostMemory"},
    }
    for owner, names in calls.items():
        for name, mentioned in names.items():
            assert mentioned in getattr(owner, name).__doc__
