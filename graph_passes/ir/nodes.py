"""Typed access to ONNX nodes."""

from typing import TypeGuard

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """`node` is one of these standard operators."""
    return node is not None and node.op_type in op_types and not node.domain


def is_float_cast(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """`node` casts to a floating point type of 16 bits or more; other Casts round to another function."""
    return is_op(node, "Cast") and node.attributes["to"].as_int() in (*FLOATS, ir.DataType.DOUBLE)


def operand(node: ir.Node, index: int) -> ir.Value:
    """A mandatory input."""
    value = node.inputs[index]
    assert value is not None, f"node '{node.name}' ({node.op_type}) lacks input {index}"
    return value


def optional_operand(node: ir.Node, index: int) -> ir.Value | None:
    """An input that may be absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def drops(node: ir.Node | None) -> bool:
    """`node` is a Dropout in training mode, or may be: one that is asked to drop values when it runs."""
    training = optional_operand(node, 2) if is_op(node, "Dropout") else None
    tensor = None if training is None else get_const_tensor(training)
    return training is not None and (tensor is None or bool(tensor.numpy()))


def ints_attribute(node: ir.Node, name: str) -> list[int] | None:
    """An attribute that lists integers, or None."""
    found = node.attributes.get(name)
    return None if found is None else list(found.as_ints())


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant integer tensor, flattened, or None."""
    tensor = None if value is None else get_const_tensor(value)
    return None if tensor is None else [int(number) for number in np.asarray(tensor.numpy()).reshape(-1)]


def register(graph: ir.Graph, value: ir.Value) -> None:
    """Adds an initializer that was made; where the model has one of its name, under another name."""
    while graph.initializers.get(value.name or "", value) is not value:
        value.name = f"{value.name}_"
    graph.register_initializer(value)


def flatten(graph: ir.Graph, node: ir.Node, features: int) -> ir.Node:
    """A Reshape of the output of `node` to [rows, features]."""
    rows = ir.tensor([-1, features], name=f"{node.name}/rows")
    shape = ir.val(rows.name, const_value=rows)
    register(graph, shape)
    node.outputs[0].name = f"{node.name}/output"
    return ir.node("Reshape", [node.outputs[0], shape], name=f"{node.name}/flatten")


def with_width(graph: ir.Graph, value: ir.Value, width: int, name: str) -> list[ir.Node]:
    """A Reshape called `name` that states the last dimension of `value`, if its shape does not: TensorRT would take the
    largest number that the other dimensions' ranges seem to allow."""
    if value.shape is None or len(value.shape) < 2 or isinstance(value.shape[-1], int):
        return []
    shape = ir.tensor([*[0] * (len(value.shape) - 1), width], ir.DataType.INT64, f"{name}/shape")
    operand = ir.val(shape.name, const_value=shape)
    register(graph, operand)
    node = ir.node("Reshape", [value, operand], name=name)
    node.outputs[0].name, node.outputs[0].type = f"{name}/output", value.type
    node.outputs[0].shape = ir.Shape([*value.shape[:-1], width])
    return [node]


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    """Inserts nodes where `value` is known: behind what produces it, or in front where it is an input."""
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], nodes)
    else:
        graph.insert_after(producer, nodes)


def rank(value: ir.Value) -> int | None:
    """Number of dimensions, where known."""
    return None if value.shape is None else len(value.shape)


def constant_source(value: ir.Value) -> tuple[ir.Value, bool, tuple[ir.Node, ...]] | None:
    """Follows float Casts, Identities and matrix Transposes back to a constant: constant, transposed, nodes between."""
    transposed, nodes = False, []
    while get_const_tensor(value) is None:
        node = value.producer()
        if is_op(node, "Transpose") and ints_attribute(node, "perm") in (None, [1, 0]):
            transposed = not transposed
        elif not (is_float_cast(node) or is_op(node, "Identity")):
            return None
        nodes.append(node)
        value = operand(node, 0)
    return value, transposed, tuple(nodes)
