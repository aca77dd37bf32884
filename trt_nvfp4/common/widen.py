"""bfloat16 models for ONNX Runtime's CPU provider, which has hardly a bfloat16 kernel: compute them in float32."""

from collections.abc import Collection

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from trt_nvfp4.common.nested_graphs import nested, within

# Int attributes that name a data type: of Cast, the random generators, QuantizeLinear, normalisations, attention.
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type", "softmax_precision"}


def widen(model: ModelProto, rounding: bool = False) -> ModelProto:
    """Make every bfloat16 tensor of `model` float32; changes the model itself, and returns it.

    Weights stay as they are, in memory or in their external file: a Cast behind each one widens it when it is used, and
    `cpu_session` keeps ONNX Runtime from holding all of them widened. Inputs and outputs become float32. Roundings to
    bfloat16 in between disappear, unless `rounding` asks for those of the main graph's nodes: then what each of them
    computes is rounded, where the model says that it is bfloat16. A model without bfloat16 is not touched.
    """
    rounded = _bfloat16_outputs(model.graph) if rounding else {}
    for graph in nested(model.graph):
        _widen_graph(graph)
    for function in model.functions:
        for node in function.node:
            widen_node(node)
            for graph in within(node):
                _widen_graph(graph)
        for value in function.value_info:
            _widen_type(value.type)
    if rounded:
        _round(model.graph, rounded)
    return model


def _bfloat16_outputs(graph: GraphProto) -> set[str]:
    values = (*graph.value_info, *graph.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.BFLOAT16}


def _round(graph: GraphProto, rounded: Collection[str]) -> None:
    """Two Casts behind each node that computes one of the tensors `rounded`, which they give their names."""
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in rounded:
                node.output[index], narrow = f"{name}/exact", f"{name}/rounded"
                nodes.append(
                    onnx.helper.make_node("Cast", [node.output[index]], [narrow], narrow, to=TensorProto.BFLOAT16)
                )
                nodes.append(onnx.helper.make_node("Cast", [narrow], [name], f"{name}/widened", to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_graph(graph: GraphProto) -> None:
    weights = [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.BFLOAT16]
    names = {tensor.name for tensor in weights}
    overridable = [value for value in graph.input if value.name in names]
    for value in overridable:
        graph.input.remove(value)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            _widen_type(value.type)
    for node in graph.node:
        widen_node(node)
    casts = []
    for tensor in weights:
        narrow = f"{tensor.name}/bfloat16"
        casts.append(
            onnx.helper.make_node("Cast", [narrow], [tensor.name], f"{tensor.name}/widen", to=TensorProto.FLOAT)
        )
        tensor.name = narrow
    if casts:
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)


def widen_node(node: NodeProto, narrow: Collection[int] = (TensorProto.BFLOAT16,)) -> None:
    """Make the types of `narrow` that attributes of `node` name or have float32, subgraphs aside."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.INT:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in narrow:
                attribute.i = TensorProto.FLOAT
        elif attribute.type == AttributeProto.TENSOR and attribute.t.data_type in narrow:
            attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))


def _widen_type(type_: TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind == "tensor_type" and type_.tensor_type.elem_type == TensorProto.BFLOAT16:
        type_.tensor_type.elem_type = TensorProto.FLOAT
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(type_, kind).elem_type)
