"""Reductions that are added to a model, so that statistics of its inner tensors leave it and the tensors do not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.nested_graphs import within
from trt_nvfp4.plugins.ops.number_formats import BLOCK

# The operators that reductions along axes are written in: negative axes of Flatten.
_LEAST_OPSET = 11


@dataclass(frozen=True)
class Reduction:
    """How a statistic is reduced inside the graph, combined over samples, and finished, given the number of rows."""

    value: "Callable[[Builder, str], str]"
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
    finish: Callable[[np.ndarray, int], np.ndarray] = lambda total, rows: total


class Builder:
    """Appends nodes to a graph; outputs are float32 and come in the order of the calls."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
        self._made: dict[tuple[object, ...], str] = {}
        del model.graph.output[:]

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node, or of the one that computes the same."""
        key = (op, *inputs, *((k, str(v)) for k, v in attributes.items()))
        if key not in self._made:
            name = f"calibration/{len(self._made)}/{op}"
            self.model.graph.node.append(helper.make_node(op, inputs, [name], name, **attributes))
            self._made[key] = name
        return self._made[key]

    def constant(self, value: np.ndarray) -> str:
        """An initializer."""
        key = ("constant", value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            self._made[key] = f"calibration/{len(self._made)}/constant"
            self.model.graph.initializer.append(numpy_helper.from_array(value, self._made[key]))
        return self._made[key]

    def reduce(self, op: str, x: str, *axes: int) -> str:
        """`op` over axes, which became an input with opset 13 (ReduceSum) and 18 (the others)."""
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return self.node(op, x, self.constant(np.array(axes)), keepdims=0)
        return self.node(op, x, axes=axes, keepdims=0)

    def magnitudes(self, tensor: str) -> str:
        """|x| in float32."""
        return self.node("Abs", self.node("Cast", tensor, to=TensorProto.FLOAT))

    def rows(self, tensor: str) -> str:
        """x as float32 [rows, K]."""
        if self.opset < _LEAST_OPSET:
            raise CalibrationError(f"these statistics need opset {_LEAST_OPSET} or later, the model has {self.opset}")
        return self.node("Flatten", self.node("Cast", tensor, to=TensorProto.FLOAT), axis=-1)

    def blocks(self, tensor: str) -> str:
        """x and a row of zeros as float32 [rows + 1, K/16, 16]: without any row Reshape cannot infer K/16, and ONNX
        Runtime's product of transposed matrices divides by zero."""
        rows = self.node("Pad", self.rows(tensor), self.constant(np.array([0, 0, 1, 0])))
        return self.node("Reshape", rows, self.constant(np.array([0, -1, BLOCK])))

    def output(self, name: str, element_type: int = TensorProto.FLOAT) -> None:
        """Make a value an output."""
        self.model.graph.output.append(helper.make_tensor_value_info(name, element_type, None))


def _block_gram(graph: Builder, tensor: str) -> str:
    blocks = graph.blocks(tensor)
    return graph.node(
        "MatMul", graph.node("Transpose", blocks, perm=[1, 2, 0]), graph.node("Transpose", blocks, perm=[1, 0, 2])
    )


REDUCTIONS: Mapping[str, Reduction] = {
    "amax": Reduction(lambda g, x: g.node("ReduceMax", g.magnitudes(x), keepdims=0), np.maximum),
    "channel_amax": Reduction(lambda g, x: g.reduce("ReduceMax", g.node("Abs", g.rows(x)), 0), np.maximum),
    "head_amax": Reduction(lambda g, x: g.reduce("ReduceMax", g.magnitudes(x), 0, 2, 3), np.maximum),
    "mean_square": Reduction(lambda g, x: g.reduce("ReduceSumSquare", g.rows(x), 0), np.add, np.divide),
    "block_gram": Reduction(_block_gram, np.add, np.divide),
}


def keep_only_outputs(model: ModelProto) -> None:
    """Remove the nodes that no output depends on; initializers stay, unread."""
    graph = model.graph
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
            for body in within(node):
                needed.update(name for inner in body.node for name in inner.input)
                needed.update(output.name for output in body.output)
    del graph.node[:]
    graph.node.extend(reversed(kept))
