"""ONNX files without their weights: what they hold, and by their metadata where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import METADATA as REWRITTEN

# What an exported model's metadata says: the directory's name.
EXPORTED = "trt_nvfp4.exported"


def read(path: Path) -> onnx.ModelProto:
    """The model. Raises BuilderError (model) for a file that is none."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error types
        raise BuilderError(MODEL_AT_FAULT, f"{path}: not an ONNX file, or a truncated one ({error})") from error
    if not model.graph.node:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: not an ONNX model: it has no nodes")
    return model


def read_if_any(path: Path) -> onnx.ModelProto | None:
    """The model; None for a folder, a pipe, and a file that is none, which whoever needs the model reports."""
    try:
        return read(path) if path.is_file() else None
    except BuilderError:
        return None


def is_rewritten(model: onnx.ModelProto | None) -> bool:
    """Whether this program has rewritten the model, whatever the plan made of it."""
    return model is not None and any(entry.key == REWRITTEN for entry in model.metadata_props)


def is_exported(model: onnx.ModelProto | None) -> bool:
    """Whether this program has exported the model from a Hugging Face directory."""
    return model is not None and any(entry.key == EXPORTED for entry in model.metadata_props)


def rewritten_by(model: onnx.ModelProto) -> dict[str, Any]:
    """What this program noted of the plan when it rewrote the model; see `graph_passes.rewrite`."""
    (noted,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == REWRITTEN)
    return dict(noted)


def check_plan(rewritten: Path, plan: Plan) -> None:
    """Raises BuilderError (usage) where a rewritten model follows another plan: nothing would check what the model
    holds, and reports would say what is not so."""
    followed = rewritten_by(read(rewritten))
    theirs = {"its target": followed["target"], "its recipe": followed["recipe"], **followed["decisions"]}
    ours = {entry.name: entry.decision for entry in plan.subgraphs}
    ours |= {"its target": plan.target, "its recipe": plan.recipe}
    for name in {**theirs, **ours}:
        there, here = theirs.get(name, "missing"), ours.get(name, "missing")
        if there != here:
            raise BuilderError(
                USAGE,
                f"{rewritten}: was rewritten by another plan than {plan.path or 'this one'}: {name} is {there} there, "
                f"and {here} here; give the plan that it was rewritten by, or rewrite the original model by this one",
            )
