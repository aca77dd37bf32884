"""Lowers a subgraph to 16 bits: Casts around it, its constants converted."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, register
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.lowerings.context import Converted, LoweringContext
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp
from trt_nvfp4.graph_passes.subgraphs.products import ProductSubgraph
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, constant, torch_dtype

_CHUNK_VALUES = 1 << 23


def lower_half(context: LoweringContext, subgraph: ProductSubgraph, to: ir.DataType) -> list[str]:
    """Computes the MLPs, the linears, or every linear of the experts of `subgraph` in 16 bits, `to`.

    Norms and residuals of merged blocks stay, as does the routing. Returns the names of the multiplying nodes.
    """
    parts: list[Mlp | Linear] = list(subgraph.mlps)
    if not subgraph.matrices:  # the experts share stacked weights and fused projections
        parts = list({linear.multiply: _whole(linear) for linear in subgraph.linears}.values())
    elif not parts:
        parts = list(subgraph.linears)
    # From the last to the first, so that no part is lowered before those that read its output.
    for part in reversed(parts):
        _lower(context.graph, part, to, context.position, context.converted)
    return list(dict.fromkeys(linear.multiply.name or "" for linear in subgraph.linears))


def _whole(linear: Linear) -> Linear:
    """The fused projection that `linear` is a part of, or itself."""
    *nodes, last = linear.nodes
    if last is linear.y.producer() and is_op(last, "Split", "Slice", "Gather"):
        return replace(linear, y=operand(last, 0), nodes=tuple(nodes))
    return linear


def _lower(
    graph: ir.Graph, part: Mlp | Linear, to: ir.DataType, position: Mapping[ir.Node, int], converted: Converted
) -> None:
    linears = part.linears if isinstance(part, Mlp) else (part,)
    of = linears[0].weight.dtype
    nodes = {*part.nodes, *(node for linear in linears for node in linear.weight_nodes)}
    ordered = [node for node in sorted(nodes, key=position.__getitem__) if _constant_type(node.outputs[0]) is None]
    outside = _cast(part.x, to)
    graph.insert_before(next(node for node in ordered if part.x in node.inputs), outside)
    for node in ordered:
        for index, value in enumerate(node.inputs):
            if value is part.x:
                node.replace_input_with(index, outside.outputs[0])
            elif value is not None and _constant_type(value) == of:
                node.replace_input_with(index, _converted(graph, value, to, converted))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == of:
            node.attributes["to"] = ir.AttrInt64("to", to)
        for output in node.outputs:
            if output.dtype == of:
                output.type = ir.TensorType(to)
    users = list(part.y.uses())
    back = _cast(part.y, of)
    graph.insert_after(ordered[-1], back)
    for user, index in users:
        user.replace_input_with(index, back.outputs[0])
    if part.y.is_graph_output():
        # The graph output keeps its name and type: it is now the Cast's.
        back.outputs[0].name, part.y.name = part.y.name, f"{part.y.name}.{to.name.lower()}"
        graph.outputs[graph.outputs.index(part.y)] = back.outputs[0]


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    name = f"{value.name}.to_{to.name.lower()}"
    node = ir.node("Cast", [value], {"to": int(to)}, name=name)
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = name, value.shape, ir.TensorType(to)
    return node


def _constant_type(value: ir.Value) -> ir.DataType | None:
    """The type of a constant, or of the result of casting and moving one; None for other values."""
    if (tensor := get_const_tensor(value)) is not None:
        return tensor.dtype
    node = value.producer()
    if not is_op(node, "Cast", "Gather", "GatherND", "Identity", "Transpose"):
        return None
    source, *others = (None if operand is None else _constant_type(operand) for operand in node.inputs)
    if source is None or None in others:
        return None
    return ir.DataType(node.attributes["to"].as_int()) if node.op_type == "Cast" else source


def _converted(graph: ir.Graph, value: ir.Value, to: ir.DataType, converted: Converted) -> ir.Value:
    """`value`, a constant or what nodes make of one, made anew in type `to`: others may read it."""
    if (value, to) not in converted:
        if get_const_tensor(value) is not None:
            converted[value, to] = _initializer(graph, value, to)
        else:
            converted[value, to] = _copy(graph, value, to, converted)
    return converted[value, to]


def _copy(graph: ir.Graph, value: ir.Value, to: ir.DataType, converted: Converted) -> ir.Value:
    """The output of a copy of the node that makes `value` of constants."""
    node = value.producer()
    assert node is not None
    source, *others = node.inputs
    assert source is not None
    moved = source if node.op_type == "Cast" else _converted(graph, source, to, converted)
    name = f"{value.name}.{to.name.lower()}"
    copy = ir.node(node.op_type, [moved, *others], node.attributes, name=name)
    if node.op_type == "Cast":
        copy.attributes["to"] = ir.AttrInt64("to", to)
    copy.outputs[0].name, copy.outputs[0].shape, copy.outputs[0].type = name, value.shape, ir.TensorType(to)
    graph.insert_after(node, copy)
    return copy.outputs[0]


def _initializer(graph: ir.Graph, value: ir.Value, to: ir.DataType) -> ir.Value:
    """The constant in type `to`, as an initializer that is converted while it is written."""
    tensor = get_const_tensor(value)
    assert tensor is not None

    def pieces() -> Iterator[torch.Tensor]:
        flat = constant(value).reshape(-1)
        for start in range(0, flat.size, _CHUNK_VALUES):
            yield as_torch(flat[start : start + _CHUNK_VALUES]).to(torch_dtype(to))

    streamed = StreamedTensor(f"{value.name}.{to.name.lower()}", to, tensor.shape.numpy(), pieces)
    result = ir.val(streamed.name, const_value=streamed)
    register(graph, result)
    return result
