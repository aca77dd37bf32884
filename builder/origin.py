"""Where an ONNX file comes from, by what its metadata says."""

from __future__ import annotations

from pathlib import Path

import onnx

from trt_nvfp4.graph_passes.rewrite import METADATA as REWRITTEN

# What an exported model's metadata says: the directory's name.
EXPORTED = "trt_nvfp4.exported"


def is_rewritten(path: Path) -> bool:
    """Whether `path` is an ONNX file that this program has rewritten, whatever the plan made of it."""
    return path.suffix == ".onnx" and path.is_file() and _says(path, REWRITTEN)


def is_exported(path: Path) -> bool:
    """Whether `path` is an ONNX file that this program has exported from a Hugging Face directory."""
    return _says(path, EXPORTED)


def _says(path: Path, key: str) -> bool:
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # protobuf's own error types; whoever reads the model reports them
        return False
    return any(entry.key == key for entry in model.metadata_props)
