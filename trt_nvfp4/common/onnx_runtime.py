"""ONNX Runtime, which is not to report on its users' models: from 1.31 on it collects their names and paths, in
`~/.cache/Microsoft`, unless it is told not to before it is imported."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["lacks_caches", "onnxruntime"]

# The first version with TensorScatter.
_WITH_CACHES = (1, 25)


def lacks_caches() -> str | None:
    """Why this version runs no models with caches; None for one that does."""
    found = onnxruntime.__version__
    if tuple(int(part) for part in found.split(".")[:2]) >= _WITH_CACHES:
        return None
    return (
        f"ONNX Runtime {found} is too old for models with caches (TensorScatter); install onnxruntime "
        f"{'.'.join(map(str, _WITH_CACHES))} or newer, which needs Python 3.11 or newer"
    )
