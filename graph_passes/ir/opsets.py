"""Operators that a model's operator set cannot be raised past, because they mean another thing since."""

from collections.abc import Iterator

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op

_CHANGED = {"DFT": 20, "GridSample": 20, "GroupNormalization": 21}


def changed_before(model: ir.Model, opset: int) -> Iterator[ir.Node]:
    """The nodes of `model` that would mean another thing in the operator set `opset`."""
    now = model.opset_imports[""]
    return (
        node for node in model.graph.all_nodes() if is_op(node, *_CHANGED) and now < _CHANGED[node.op_type] <= opset
    )
