"""Weights [1, K, N] become [K, N], as the patterns and TensorRT's Q/DQ know them; the product is the same."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, is_op, operand, rank


def squeeze_weights(graph: ir.Graph) -> None:
    """Takes the leading ones off every weight that only MatMuls read, of inputs with as many dimensions or more."""
    for weight in graph.initializers.values():
        tensor = weight.const_value
        if tensor is None or tensor.dtype not in FLOATS or weight.is_graph_output():
            continue
        *leading, rows, columns = (1, 1, *tensor.shape.numpy())
        if len(tensor.shape) < 3 or set(leading) != {1}:
            continue
        if all(_multiplies(node, index, len(tensor.shape)) for node, index in weight.uses()):
            weight.shape = ir.Shape([rows, columns])
            weight.const_value = reshaped(tensor, weight.shape)


def _multiplies(node: ir.Node, index: int, dimensions: int) -> bool:
    """By a weight of that many dimensions, without giving the product more than the input has."""
    return is_op(node, "MatMul") and index == 1 and (rank(operand(node, 0)) or 0) >= dimensions


def reshaped(tensor: ir.TensorProtocol, shape: ir.Shape) -> ir.TensorProtocol:
    """The same values in another shape; none is copied."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=shape,
            name=tensor.name,
            base_dir=tensor.base_dir,
        )
    if isinstance(tensor, ComputedTensor):
        return tensor.reshaped(shape.numpy())
    return ir.Tensor(tensor.numpy().reshape(shape.numpy()), dtype=tensor.dtype, shape=shape, name=tensor.name)
