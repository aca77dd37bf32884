"""Counts the products with constants that a plan has no entry for, so that both add up to the model."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.nodes import is_op, operand
from trt_nvfp4.graph_passes.plan import Plan
from trt_nvfp4.graph_passes.rewrite import weights_bytes
from trt_nvfp4.graph_passes.source import SourceModel

_PRODUCTS = (
    *("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "DeformConv", "RNN", "GRU", "LSTM"),
    *("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv"),
)
# In ONNX Runtime's own domain.
_CONTRIB_PRODUCTS = (
    *("Attention", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulBnb4", "MatMulIntegerToFloat", "MatMulNBits"),
    *("MoE", "QAttention", "QGemm", "QLinearConv", "QMoE"),
)
# What may lie between a constant and the product.
_REARRANGING = (
    *("Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice", "Split"),
    *("QuantizeLinear", "DequantizeLinear"),
)
# What chooses matrices of a stack; of a table with two dimensions it chooses rows, as embeddings do.
_CHOOSING = ("Gather", "GatherND")


@dataclass(frozen=True)
class UnplannedProducts:
    """How many nodes of an operator multiply by constants and stay as they are, the bytes of these constants, each
    counted once, and their share of the bytes of all constants."""

    count: int
    weight_bytes: int
    share: float


def unplanned_products(model: SourceModel, plan: Plan) -> dict[str, UnplannedProducts]:
    """By operator, the products with constant matrices that no entry of `plan` contains, most bytes first.

    Those in the bodies of control flow are among them. A constant that products of several operators share counts for
    the first of them. Constant vectors are no matrices, whatever their number of dimensions.
    """
    planned = {name for entry in plan.subgraphs for name in entry.nodes}
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    seen: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        if not _is_product(node) or (node.graph is model.graph and node.name in planned):
            continue
        matrices = dict.fromkeys(filter(None, map(_constant_matrix, node.inputs)))
        if not matrices:
            continue
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
        sizes[node.op_type] = sizes.get(node.op_type, 0) + sum(_bytes(value) for value in matrices if value not in seen)
        seen.update(matrices)
    total = sum(map(weights_bytes, (model.graph, *model.graph.subgraphs())))
    found = {
        op_type: UnplannedProducts(count, sizes[op_type], sizes[op_type] / max(total, 1))
        for op_type, count in counts.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].weight_bytes))


def _is_product(node: ir.Node) -> bool:
    return is_op(node, *_PRODUCTS) or (node.domain == "com.microsoft" and node.op_type in _CONTRIB_PRODUCTS)


def _constant_matrix(value: ir.Value | None) -> ir.Value | None:
    """The constant that `value` is made of, if it is one of two dimensions or more."""
    if value is None:
        return None
    least = 2
    while (tensor := get_const_tensor(value)) is None:
        producer = value.producer()
        if producer is None or producer.op_type not in (*_REARRANGING, *_CHOOSING):
            return None
        least += producer.op_type in _CHOOSING
        value = operand(producer, 0)
    return value if sum(dimension > 1 for dimension in tensor.shape.numpy()) >= least else None


def _bytes(value: ir.Value) -> int:
    tensor = get_const_tensor(value)
    assert tensor is not None
    return tensor.nbytes
