"""Matrices that constant numbers pick from a stack [experts, ...] become weights of their own, as TorchScript has them:
a loop over all experts of a stack (torch's other exporter leaves Gathers) is then one over modules."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from trt_nvfp4.graph_passes.batched_weights import reshaped
from trt_nvfp4.graph_passes.nodes import FLOATS, constant_integers, is_op, operand, register


def split_stacks(graph: ir.Graph) -> None:
    """Splits every stack of matrices or vectors of which each use is a Gather of one part, known by its number."""
    for stack, tensor in list(_stacks(graph)):
        count, *shape = tensor.shape.numpy()
        numbers = {node: _picked(node, index, count) for node, index in stack.uses()}
        if stack.is_graph_output() or not numbers or None in numbers.values():
            continue
        parts = {number: ir.val(f"{stack.name}[{number}]") for number in numbers.values()}
        for number, value in parts.items():
            assert number is not None
            value.const_value = _part(tensor, number, ir.Shape(shape))
            value.dtype, value.shape = tensor.dtype, ir.Shape(shape)
            register(graph, value)
        for node, number in numbers.items():
            ir.convenience.replace_all_uses_with(node.outputs[0], parts[number])


def _stacks(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Constants of two dimensions or more, and what Reshapes make of them (DBRX keeps the rows of all experts)."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if len(tensor.shape) >= 2:
            yield value, tensor
        for node, index in value.uses():
            shape = node.outputs[0].shape
            if is_op(node, "Reshape") and index == 0 and shape is not None and shape.is_static() and len(shape) >= 2:
                yield node.outputs[0], reshaped(tensor, ir.Shape(shape.numpy()))


def _picked(node: ir.Node, index: int, count: int) -> int | None:
    """The number of the part that `node` takes of its input `index`, a stack of `count`."""
    if not is_op(node, "Gather") or index != 0 or node.attributes.get_int("axis", 0) != 0:
        return None
    number = operand(node, 1)
    numbers = constant_integers(number)
    if numbers is None or number.shape is None or len(number.shape) != 0 or node.outputs[0].is_graph_output():
        return None
    return numbers[0] % count if -count <= numbers[0] < count else None


def _part(stack: ir.TensorProtocol, number: int, shape: ir.Shape) -> ir.TensorProtocol:
    """One part; none of its values is copied."""
    if isinstance(stack, ir.ExternalTensor):
        size = stack.nbytes // int(stack.shape.numpy()[0])
        return ir.ExternalTensor(
            stack.location,
            (stack.offset or 0) + number * size,
            size,
            stack.dtype,
            shape=shape,
            name=f"{stack.name}[{number}]",
            base_dir=stack.base_dir,
        )
    return ir.Tensor(stack.numpy()[number], dtype=stack.dtype, shape=shape)
