"""Matches products with weights that are quantized already, which are no candidates: rounding them again adds error."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand

# Of integers, in ONNX and in ONNX Runtime's own domain.
_INTEGER_OPS = ("MatMulInteger", "QLinearMatMul")
_CONTRIB_OPS = ("DynamicQuantizeMatMul", "MatMulBnb4", "MatMulIntegerToFloat", "MatMulNBits", "QGemm")
_SAME_VALUES = ("Cast", "Identity", "Reshape", "Transpose")


def is_quantized_product(node: ir.Node) -> bool:
    """`node` multiplies integers, or by what a DequantizeLinear makes of a constant."""
    if is_op(node, *_INTEGER_OPS) or (node.domain == "com.microsoft" and node.op_type in _CONTRIB_OPS):
        return True
    if not is_op(node, "MatMul", "Gemm"):
        return False
    producer = operand(node, 1).producer()
    while is_op(producer, *_SAME_VALUES):
        producer = operand(producer, 0).producer()
    if not is_op(producer, "DequantizeLinear"):
        return False
    source = operand(producer, 0)
    quantize = source.producer()
    return get_const_tensor(operand(quantize, 0) if is_op(quantize, "QuantizeLinear") else source) is not None
