"""Weights that a model makes of constants when it runs become constants, which the patterns know."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import FLOATS, is_op, operand, register
from trt_nvfp4.graph_passes.ir.tensors import read_tensor

# What makes weights when a model runs: parametrizations (weight_norm, spectral_norm) and changes of layout. Rounding is
# left, as the results are quantized already, and so is what takes parts: `split_stacks` does without a copy.
_WEIGHT_MAKING = (
    *("Abs", "Add", "Cast", "Clip", "Concat", "Div", "Expand", "Identity", "MatMul", "Max", "Mul", "Neg", "Pow"),
    *("Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reshape", "Sqrt", "Squeeze", "Sub"),
    *("Transpose", "Unsqueeze"),
)


def fold_weights(graph: ir.Graph) -> None:
    """Matrices that products multiply by and constants make become constants, computed anew whenever they are read.

    None is held in memory, so that stacks of matrices are left: of these, one matrix at a time is read. So are those
    that are larger than what they are made of.
    """
    made: dict[ir.Value, ir.TensorProtocol] = {}

    def tensors(node: ir.Node) -> list[ir.TensorProtocol | None]:
        return [None if value is None else made.get(value, get_const_tensor(value)) for value in node.inputs]

    for node in graph:
        if _makes_weights(node) and all(
            tensor is not None or value is None for tensor, value in zip(tensors(node), node.inputs, strict=True)
        ):
            made[node.outputs[0]] = _computed(node, tensors(node))
    for node in graph:
        if not is_op(node, "MatMul", "Gemm"):
            continue
        value = operand(node, 1)
        while is_op(producer := value.producer(), "Cast", "Identity", "Transpose"):
            value = operand(producer, 0)  # linears know these
        if producer is None or value not in made or len(made[value].shape) != 2 or value.is_graph_output():
            continue
        if made[value].nbytes <= sum(tensor.nbytes for tensor in tensors(producer) if tensor is not None):
            weight = ir.val(f"{value.name}.folded", const_value=made[value])
            register(graph, weight)
            value.replace_all_uses_with(weight)


def _makes_weights(node: ir.Node) -> bool:
    shape, dtype = node.outputs[0].shape, node.outputs[0].dtype
    if not is_op(node, *_WEIGHT_MAKING) or shape is None or not shape.is_static() or dtype not in FLOATS:
        return False
    return not is_op(node, "Cast") or operand(node, 0).dtype in FLOATS  # of other types, weights are quantized already


def _computed(node: ir.Node, tensors: Sequence[ir.TensorProtocol | None]) -> ir.TensorProtocol:
    """The output of `node` for constant inputs; of 16 bits, in float32, as ONNX Runtime and TensorRT sum."""
    proto, output = ir.to_proto(node), node.outputs[0]
    names = ["" if tensor is None else f"i{number}" for number, tensor in enumerate(tensors)]
    proto.input[:], proto.output[:] = names, ["o"]
    assert output.dtype is not None
    assert output.shape is not None
    dtype = output.dtype

    def compute() -> ir.TensorProtocol:
        feeds = {
            name: read_tensor(tensor).astype(np.float32 if tensor.dtype in FLOATS else tensor.dtype.numpy(), copy=False)
            for name, tensor in zip(names, tensors, strict=True)
            if tensor is not None
        }
        (result,) = ReferenceEvaluator(proto).run(None, feeds)
        return ir.Tensor(np.asarray(result, dtype.numpy()), dtype=dtype)

    return ir.LazyTensor(compute, dtype, ir.Shape(output.shape.numpy()), name=output.name)
