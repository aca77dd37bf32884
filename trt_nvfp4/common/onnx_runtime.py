"""ONNX Runtime, which is not to report on its users' models: from 1.31 on it collects their names and paths, in
`~/.cache/Microsoft`, unless it is told not to before it is imported."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["onnxruntime"]
