"""ONNX files without their weights: what they hold, and by their metadata where they come from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, TypeGuard

import onnx

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.planning.plan import Plan

# What an exported model's metadata says: the directory's name.
EXPORTED = "trt_nvfp4.exported"
# What is written of a model for TensorRT alone says: the whole model's name.
WITHOUT_WEIGHTS = "trt_nvfp4.without_weights"
_NOTE = f"its metadata '{REWRITTEN}'"
_REWRITE_AGAIN = "rewrite the original model again"


def read(path: Path) -> onnx.ModelProto:
    """The model. Raises BuilderError: model for a file that is none, usage for a network whose plugins have their
    weights in another file."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error types
        raise BuilderError(MODEL_AT_FAULT, f"{path}: not an ONNX file, or a truncated one ({error})") from error
    if not model.graph.node:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: not an ONNX model: it has no nodes")
    if any(entry.key == WITHOUT_WEIGHTS for entry in model.metadata_props):
        raise BuilderError(
            USAGE,
            f"{path}: is what TensorRT builds a --strip engine from, without the weights of its plugins; give "
            "model.onnx beside it, or the bundle",
        )
    return model


def read_if_any(path: Path) -> onnx.ModelProto | None:
    """The model; None for a folder, a pipe, and a file that is none, which whoever needs the model reports. Raises
    BuilderError (usage) as `read`."""
    try:
        return read(path) if path.is_file() else None
    except BuilderError as error:
        if error.exit_code == USAGE:
            raise
        return None


def is_rewritten(model: onnx.ModelProto | None) -> bool:
    """Whether this program has rewritten the model, whatever the plan made of it."""
    return model is not None and any(entry.key == REWRITTEN for entry in model.metadata_props)


def is_exported(model: onnx.ModelProto | None) -> bool:
    """Whether this program has exported the model from a Hugging Face directory."""
    return model is not None and any(entry.key == EXPORTED for entry in model.metadata_props)


def rewritten_by(path: Path) -> dict[str, Any]:
    """What this program noted of the plan in the model at `path` when it rewrote it; see `graph_passes.rewrite`.

    Raises BuilderError (model) for a note that is none.
    """
    texts = [entry.value for entry in read(path).metadata_props if entry.key == REWRITTEN]
    try:
        noted = parse_json(texts[0])
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: {_NOTE} is not JSON ({error}); {_REWRITE_AGAIN}") from error
    if len(texts) > 1 or not _is_note(noted):
        raise BuilderError(MODEL_AT_FAULT, f"{path}: {_NOTE} is not what this program writes; {_REWRITE_AGAIN}")
    return {"quantized": [], **noted}  # older versions wrote no such list


def _is_note(noted: Any) -> TypeGuard[dict[str, Any]]:
    types = {"target": str, "recipe": str, "calibrated": bool, "decisions": dict, "realized": dict}
    if not isinstance(noted, dict) or not all(isinstance(noted.get(key), of) for key, of in types.items()):
        return False
    lists = [*noted["realized"].values(), noted.get("quantized", [])]
    if not all(isinstance(names, list) for names in lists):
        return False
    return all(isinstance(name, str) for name in (*noted["decisions"].values(), *itertools.chain(*lists)))


def check_plan(rewritten: Path, plan: Plan) -> None:
    """Raises BuilderError (usage) where a rewritten model follows another plan: nothing would check what the model
    holds, and reports would say what is not so."""
    followed = rewritten_by(rewritten)
    theirs = {"its target": followed["target"], "its recipe": followed["recipe"], **followed["decisions"]}
    ours = {entry.name: str(entry.decision) for entry in plan.subgraphs}
    ours |= {"its target": plan.target, "its recipe": plan.recipe}
    for name in {**theirs, **ours}:
        there, here = theirs.get(name, "missing"), ours.get(name, "missing")
        if there != here:
            raise BuilderError(
                USAGE,
                f"{rewritten}: was rewritten by another plan than {plan.path or 'this one'}: {name} is {there} there, "
                f"and {here} here; give the plan that it was rewritten by, or rewrite the original model by this one",
            )
