"""Models with caches are refused where the installed ONNX Runtime does not know their operators."""

from __future__ import annotations

from pathlib import Path

from trt_nvfp4.builder.errors import UNAVAILABLE, BuilderError
from trt_nvfp4.common.onnx_runtime import lacks_caches


def check_caches_run(model: Path, instead: str = "") -> None:
    """Raises BuilderError (unavailable) where they cannot run. ONNX Runtime evaluates what attention computes: without
    these operators none would be found, and options about attention and caches would silently do nothing.

    `instead` is what else the user can do.
    """
    if (why := lacks_caches()) is not None:
        raise BuilderError(UNAVAILABLE, f"{model}: {why}{instead}")
