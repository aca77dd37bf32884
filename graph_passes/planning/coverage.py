"""Counts the products with constants that a plan has no entry for, so that both add up to the model."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.ir.tensors import weights_bytes
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.planning.plan import Plan

_PRODUCTS = (
    *("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "DeformConv", "RNN", "GRU", "LSTM"),
    *("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv"),
)
# In ONNX Runtime's own domain.
_CONTRIB_PRODUCTS = ("Attention", "MoE")
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
    the first of them. Constant vectors do not count, whatever their number of dimensions.
    """
    planned = {name for entry in plan.subgraphs for name in entry.nodes}
    made_of: dict[ir.Value, tuple[ir.Value, ...]] = {}  # values made of only constants, and these constants
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    seen: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        inputs = [value for value in node.inputs if value is not None]
        if all(value in made_of or get_const_tensor(value) is not None for value in inputs):
            constants = dict.fromkeys(constant for value in inputs for constant in made_of.get(value, (value,)))
            made_of.update(dict.fromkeys(node.outputs, tuple(constants)))
        if not _is_product(node) or (node.graph is model.graph and node.name in planned):
            continue
        matrices = dict.fromkeys(matrix for value in inputs for matrix in _matrices(value, made_of))
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


def _matrices(value: ir.Value, made_of: Mapping[ir.Value, tuple[ir.Value, ...]]) -> list[ir.Value]:
    """The constants of two dimensions or more that `value` is made of: a rearranged one, or several combined ones."""
    least = 2
    while (producer := value.producer()) is not None and producer.op_type in (*_REARRANGING, *_CHOOSING):
        least += producer.op_type in _CHOOSING
        value = operand(producer, 0)
    constants = made_of.get(value, ()) if get_const_tensor(value) is None else (value,)
    return [constant for constant in constants if _dimensions(constant) >= least]


def _dimensions(value: ir.Value) -> int:
    tensor = get_const_tensor(value)
    assert tensor is not None
    return sum(dimension > 1 for dimension in tensor.shape.numpy())


def _bytes(value: ir.Value) -> int:
    tensor = get_const_tensor(value)
    assert tensor is not None
    return tensor.nbytes
