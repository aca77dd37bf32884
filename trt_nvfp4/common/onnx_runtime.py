"""ONNX Runtime without telemetry: from 1.31 on it collects names and paths of models in `~/.cache/Microsoft`, unless a
variable that is set before the import forbids it."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["onnxruntime", "unsupported_caches", "unsupported_operator"]

# The first versions with the operators of caches and of states.
_SINCE = {"TensorScatter": (1, 25), "LinearAttention": (1, 32)}


def unsupported_caches() -> str | None:
    """Why this version runs no models with caches; None for one that does."""
    return unsupported_operator("TensorScatter")


def unsupported_operator(name: str) -> str | None:
    """Why this version does not run an operator of ONNX's; None where it does, as far as is known."""
    found, since = onnxruntime.__version__, _SINCE.get(name, (0, 0))
    if tuple(int(part) for part in found.split(".")[:2]) >= since:
        return None
    what = {"TensorScatter": "caches", "LinearAttention": "recurrent states"}[name]
    return (
        f"ONNX Runtime {found} is too old for models with {what} ({name}); install onnxruntime "
        f"{'.'.join(map(str, since))} or newer, which needs Python 3.11 or newer"
    )
