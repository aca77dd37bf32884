"""ONNX files without their weights: what they hold, and by their metadata where they come from."""

import itertools
from pathlib import Path
from typing import Any, TypeGuard

import onnx

from trt_nvfp4.builder.errors import USAGE, BuilderError, ModelFaultError, UsageError
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.lowerings.decision import RENAMED
from trt_nvfp4.graph_passes.planning.plan import Plan

# What an exported model's metadata says: the directory's name.
EXPORTED = "trt_nvfp4.exported"
# Metadata of a model that only TensorRT can read: the name of the whole model.
WITHOUT_WEIGHTS = "trt_nvfp4.without_weights"
_NOTE = f"its metadata '{REWRITTEN}'"
_REWRITE_AGAIN = "rewrite the original model again"


def read(path: Path) -> onnx.ModelProto:
    """The model. Raises BuilderError: model for an invalid file, usage for a network whose plugins have their
    weights in another file."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own error types
        raise ModelFaultError(f"{path}: not an ONNX file, or a truncated one ({error})") from error
    if not model.graph.node:
        raise ModelFaultError(f"{path}: not an ONNX model: it has no nodes")
    for value in (*model.graph.input, *model.graph.output):
        known = value.type.tensor_type.elem_type in onnx.TensorProto.DataType.values()
        if not isinstance(value.name, str) or not known:  # protobuf gives names that are not UTF-8 as bytes
            raise ModelFaultError(
                f"{path}: not an ONNX file, or a damaged one: {value.name!r} has no such name or type"
            )
    if any(entry.key == WITHOUT_WEIGHTS for entry in model.metadata_props):
        raise UsageError(
            f"{path}: is what TensorRT builds a --strip engine from, without the weights of its plugins; give "
            "model.onnx beside it, or the bundle"
        )
    return model


def opened(model: str | Path | OnnxFile) -> OnnxFile:
    """The ONNX file at a path, read, or `model` itself where it has been read. Raises as `read` does."""
    return model if isinstance(model, OnnxFile) else OnnxFile(model, read(Path(model)))


def read_if_any(path: Path) -> onnx.ModelProto | None:
    """The model; None for a folder, a pipe, and an invalid file, which later steps report. Raises
    UsageError as `read`."""
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


def rewritten_by(model: OnnxFile) -> dict[str, Any]:
    """The note of the plan in a model that this program rewrote; see `graph_passes.rewrite`.

    Raises ModelFaultError for an invalid note.
    """
    path = model.path
    texts = [entry.value for entry in model.proto.metadata_props if entry.key == REWRITTEN]
    try:
        noted = parse_json(texts[0])
    except ValueError as error:
        raise ModelFaultError(f"{path}: {_NOTE} is not JSON ({error}); {_REWRITE_AGAIN}") from error
    if len(texts) > 1 or not _is_note(noted):
        raise ModelFaultError(f"{path}: {_NOTE} is not what this program writes; {_REWRITE_AGAIN}")
    decisions = {name: RENAMED.get(decision, decision) for name, decision in noted["decisions"].items()}
    return {"quantized": [], **noted, "decisions": decisions}  # older versions wrote no such list


def _is_note(noted: Any) -> TypeGuard[dict[str, Any]]:
    types = {"target": str, "recipe": str, "calibrated": bool, "decisions": dict, "realized": dict}
    if not isinstance(noted, dict) or not all(isinstance(noted.get(key), of) for key, of in types.items()):
        return False
    lists = [*noted["realized"].values(), noted.get("quantized", [])]
    if not all(isinstance(names, list) for names in lists):
        return False
    return all(isinstance(name, str) for name in (*noted["decisions"].values(), *itertools.chain(*lists)))


def check_plan(rewritten: OnnxFile, plan: Plan) -> None:
    """Raises UsageError where a rewritten model follows another plan: nothing would check what the model
    holds, and reports would say what is not so."""
    followed = rewritten_by(rewritten)
    theirs = {"its target": followed["target"], "its recipe": followed["recipe"], **followed["decisions"]}
    ours = {entry.name: str(entry.decision) for entry in plan.subgraphs}
    ours |= {"its target": plan.target, "its recipe": plan.recipe}
    for name in {**theirs, **ours}:
        there, here = theirs.get(name, "missing"), ours.get(name, "missing")
        if there != here:
            raise UsageError(
                f"{rewritten}: was rewritten by another plan than {plan.path or 'this one'}: {name} is {there} there, "
                f"and {here} here; give the plan that it was rewritten by, or rewrite the original model by this one"
            )
