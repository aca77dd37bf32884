"""How many rows each subgraph multiplies at given input shapes: what its cost and its speed depend on."""

import math
from collections.abc import Iterable, Mapping
from functools import partial

import onnx

from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.inputs.shapes import derive_opt_shapes
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.onnx_process import changed_by_onnx
from trt_nvfp4.graph_passes.load.normalize import without_weights
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel
from trt_nvfp4.graph_passes.planning.plan import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


def subgraph_tokens(
    model: SourceModel,
    subgraphs: Iterable[Subgraph | PlannedSubgraph],
    opt_shapes: Mapping[str, Shape] | None = None,
) -> dict[str, int]:
    """Rows of every subgraph's input, by subgraph name, from ONNX's shape inference.

    `opt_shapes` overrides the derived opt shapes of the model's inputs. Where inference cannot tell, the rows are
    those of the model's first input: all its entries for ids, all but the last axis for values; 1 without inputs.

    Raises UsageError when a shape does not fit the model's inputs; ModelError where ONNX fails at the model.
    """
    declared = {
        value.name or "": [dim if isinstance(dim, int) else str(dim.value or "") for dim in value.shape or ()]
        for value in model.graph.inputs
    }
    shapes = derive_opt_shapes(declared, opt_shapes)
    proto = without_weights(model.ir_model)
    for value in proto.graph.input:
        if value.name in shapes:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dim.dim_value = size
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = changed_by_onnx(partial(onnx.shape_inference.infer_shapes, data_prop=True), proto).graph
    except LimitError as error:
        raise ModelError(f"{model.path}: ONNX cannot infer the shapes of its tensors: {error}") from error
    known = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    fallback = 1
    if model.graph.inputs:
        first = model.graph.inputs[0]
        rows = shapes[first.name or ""]
        fallback = math.prod(rows if first.dtype is not None and first.dtype.is_integer() else rows[:-1])
    tokens = {}
    for subgraph in subgraphs:
        dims = known.get(subgraph.input, [])
        tokens[subgraph.name] = math.prod(dims[:-1]) if len(dims) > 1 and all(dims[:-1]) else fallback
    return tokens
