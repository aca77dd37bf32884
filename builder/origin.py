"""Where an ONNX file comes from, by what its metadata says."""

from __future__ import annotations

import json
from pathlib import Path

import onnx

from trt_nvfp4.graph_passes.rewrite import METADATA as REWRITTEN

# What an exported model's metadata says: the directory's name.
EXPORTED = "trt_nvfp4.exported"


def is_rewritten(path: Path) -> bool:
    """Whether `path` is an ONNX file that this program has rewritten, whatever the plan made of it."""
    return path.suffix == ".onnx" and path.is_file() and REWRITTEN in _metadata(path)


def is_calibrated(rewritten: Path) -> bool:
    """Whether there were activation statistics when this program rewrote the model."""
    return bool(json.loads(_metadata(rewritten)[REWRITTEN]).get("calibrated"))


def is_exported(path: Path) -> bool:
    """Whether `path` is an ONNX file that this program has exported from a Hugging Face directory."""
    return EXPORTED in _metadata(path)


def _metadata(path: Path) -> dict[str, str]:
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # protobuf's own error types; whoever reads the model reports them
        return {}
    return {entry.key: entry.value for entry in model.metadata_props}
