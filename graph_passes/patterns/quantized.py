"""Matches products with weights that are quantized already, which would be rounded a second time."""

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand

# Products of integers, in ONNX and in ONNX Runtime's own domain.
_INTEGER_OPS = ("MatMulInteger", "QLinearMatMul")
_CONTRIB_OPS = ("DynamicQuantizeMatMul", "MatMulBnb4", "MatMulIntegerToFloat", "MatMulNBits", "QGemm")
_SAME_VALUES = ("Cast", "Identity", "Reshape", "Transpose")
# The operators of a dequantization that is spelled out: (Cast(q) - zero_point) * scale.
_ARITHMETIC = ("Add", "Div", "Mul", "Sub")


def is_quantized_product(node: ir.Node) -> bool:
    """`node` multiplies integers, or by what a DequantizeLinear, or arithmetic in its place, makes of a constant."""
    if is_op(node, *_INTEGER_OPS):
        return True
    if not is_op(node, "MatMul", "Gemm"):
        return False
    if _is_spelled_out(operand(node, 1)):
        return True
    producer = operand(node, 1).producer()
    while is_op(producer, *_SAME_VALUES):
        producer = operand(producer, 0).producer()
    if not is_op(producer, "DequantizeLinear"):
        return False
    source = operand(producer, 0)
    quantize = source.producer()
    return get_const_tensor(operand(quantize, 0) if is_op(quantize, "QuantizeLinear") else source) is not None


def _is_spelled_out(value: ir.Value) -> bool:
    """Whether only arithmetic on constants makes the matrix, one of them a Cast of integers: Mul(Cast(int8), scale)."""
    pending, seen, casts_integers = [value], set(), False
    while pending:
        made = pending.pop()
        if made in seen or get_const_tensor(made) is not None:
            continue
        seen.add(made)
        node = made.producer()
        if not is_op(node, *_SAME_VALUES, *_ARITHMETIC):
            return False
        source = operand(node, 0)
        tensor = get_const_tensor(source) if is_op(node, "Cast") else None
        casts_integers |= tensor is not None and tensor.dtype.is_integer() and len(tensor.shape) > 1
        pending += [source] if is_op(node, *_SAME_VALUES) else [operand(node, place) for place in range(2)]
    return casts_integers
