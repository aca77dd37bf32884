"""State that the searches for all MoE blocks of a model share."""

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.patterns.moe.experts import match_stacked_linear
from trt_nvfp4.graph_passes.subgraphs.parts import Linear


class Context:
    """Linears and constants of a model that all its blocks share."""

    def __init__(self, model: ir.Model, linears: Mapping[ir.Value, Linear]) -> None:
        self.nodes = list(model.graph)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.opset = model.opset_imports[""]
        self.linears = linears
        self.stacked = {linear.y: linear for linear in map(match_stacked_linear, self.nodes) if linear is not None}
        self.multiplies = {linear.multiply: linear for linear in (*linears.values(), *self.stacked.values())}
        # Values that depend on nothing but constants and shapes.
        self.shapes: set[ir.Value] = set()
        for node in self.nodes:
            if is_op(node, "Shape") or all(value in self.shapes for value in variables(node)):
                self.shapes.update(node.outputs)


def variables(node: ir.Node) -> list[ir.Value]:
    """The inputs of `node` without constants."""
    return [value for value in node.inputs if value is not None and get_const_tensor(value) is None]
