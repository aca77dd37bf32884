"""Kernels that TensorRT-RTX compiles when an engine first runs, kept in a file beside it for the next start."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_bytes
from trt_nvfp4.common.replacing import replacing

SUFFIX = ".runtime_cache"


class EngineWithCache:
    """An ICudaEngine whose contexts take compiled kernels from `<engine>.runtime_cache`, and leave new ones there when
    the engine is dropped or the process ends.

    TensorRT-RTX refuses a cache of another GPU, driver or version, which is then written anew. A folder that cannot be
    written to leaves the engine without one.
    """

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._config = engine.create_runtime_config()
        file = path.with_name(path.name + SUFFIX)
        cache = self._config.create_runtime_cache()
        kept = b""
        with suppress(OSError, ValueError):  # which is written anew
            kept = read_bytes(file)
        if kept and not cache.deserialize(kept):
            kept = b""
        self._config.set_runtime_cache(cache)
        # The engine lives as long as the cache that it made.
        weakref.finalize(self, _keep, file, kept, cache, engine, self._config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def create_execution_context(self) -> Any:
        """A context that shares the cache with the engine's others."""
        return self._engine.create_execution_context(self._config)


def _keep(file: Path, kept: bytes, cache: Any, *_: Any) -> None:
    found = cache.serialize()
    if found is None or (blob := bytes(memoryview(found))) == kept:
        return
    try:
        with replacing(file) as temporary:
            temporary.write_bytes(blob)
    except OSError:  # the next start compiles again
        return
