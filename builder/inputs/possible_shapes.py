"""Whether a model takes the shapes that its engine is to be built for, as far as ONNX can tell."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.inputs.shapes import Profiles
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.onnx_process import with_onnx
from trt_nvfp4.graph_passes.load.normalize import without_weights
from trt_nvfp4.graph_passes.load.shape_folding import simplify_shapes
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel


def check_possible(path: Path, model: SourceModel, profiles: Sequence[Profiles]) -> None:
    """Raise UsageError where ONNX's shape inference contradicts the min, opt or max shapes of a
    profile of `model`, which lies at `path`: TensorRT says so only when all weights have been quantized. Raise
    ModelError where ONNX fails at the model."""
    proto = without_weights(model.ir_model)
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = with_onnx(lambda: _first_contradiction(proto, profiles), proto.ByteSize())
    except LimitError as error:
        raise ModelError(f"{path}: ONNX cannot infer the shapes of its tensors: {error}") from error
    if found is not None:
        raise UsageError(
            f"{path}: does not take all shapes of the profile: at {found}; give others with --min-shapes, --opt-shapes "
            "and --max-shapes"
        )


def _first_contradiction(proto: onnx.ModelProto, profiles: Sequence[Profiles]) -> str | None:
    """The first shapes that inference contradicts, and why."""
    if _contradiction(proto, {}) is not None:
        return None  # inference cannot follow the model, whatever the shapes
    for profile in profiles:
        for bound in ("min", "opt", "max"):
            shapes = {name: getattr(entry, bound) for name, entry in profile.items() if not entry.is_values}
            if (why := _contradiction(proto, shapes)) is not None:
                shown = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
                return f"{shown}, {why}"
    return None


def _contradiction(proto: onnx.ModelProto, shapes: Mapping[str, Shape]) -> str | None:
    """The error of shape inference for inputs of these shapes."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dim.dim_value = size
    try:
        inferred = onnx.shape_inference.infer_shapes(sized, strict_mode=True, data_prop=True)
        if shapes:
            # Inference follows sizes that are computed into Reshapes, but not into Slices: of a table of positions.
            model = ir.from_proto(inferred)
            simplify_shapes(model.graph)
            folded = ir.to_proto(model)
            del folded.graph.value_info[:]
            # Without data propagation: computed sizes are folded already, and it may take a bias for a shape.
            return _reshaped(onnx.shape_inference.infer_shapes(folded, strict_mode=True).graph)
    except onnx.shape_inference.InferenceError as error:
        # The first of all that follow from each other: "(op_type:Reshape, node name: n): [ShapeInferenceError] why".
        found = re.search(r"op_type:(\w+), node name: (.*?)\): \[\w+\] (.*?)\s*(\(op_type:|$)", str(error), re.DOTALL)
        return f"node {found[2]!r} ({found[1]}): {found[3]}" if found else " ".join(str(error).split())
    return None


def _reshaped(graph: onnx.GraphProto) -> str | None:
    """A Reshape to another number of values than there are, which inference lets pass."""
    known = (*graph.value_info, *graph.input, *graph.output)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in known}
    for node in graph.node:
        given, made = (shapes.get(name, [0]) for name in (node.input[0], node.output[0])) if node.input else ([0], [0])
        if node.op_type == "Reshape" and 0 not in (*given, *made) and math.prod(given) != math.prod(made):
            return f"node {node.name!r} (Reshape): {given} do not fit {made}"
    return None
