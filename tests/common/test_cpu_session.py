"""Sessions compute what ONNX Runtime computes without any optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from trt_nvfp4.common.cpu_session import cpu_session


def position_table(mode: str, dynamic_sizes: bool, opset: int) -> onnx.ModelProto:
    """A vision transformer's table of positions, 14x14, resized to 7x7 between two Transposes, and added to x."""
    rng = np.random.default_rng(0)
    numbers = {
        "shape": [1, 14, 14, 8],
        "rows": [1, -1, 8],
        "sizes": [1, 8, 7, 7],
        "hw": [7, 7],
        "zero": [0],
        "two": [2],
    }
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    weights.append(numpy_helper.from_array(rng.normal(size=(1, 196, 8)).astype(np.float32), "table"))
    sizes = [
        helper.make_node("Shape", ["channels first"], ["all"]),
        helper.make_node("Slice", ["all", "zero", "two", "zero"], ["front"]),
        helper.make_node("Concat", ["front", "hw"], ["made sizes"], axis=0),
    ]
    nodes = [
        helper.make_node("Reshape", ["table", "shape"], ["square"]),
        helper.make_node("Transpose", ["square"], ["channels first"], perm=[0, 3, 1, 2]),
        *(sizes if dynamic_sizes else []),
        helper.make_node(
            "Resize",
            ["channels first", "", "", "made sizes" if dynamic_sizes else "sizes"],
            ["resized"],
            mode=mode,
            coordinate_transformation_mode="half_pixel",
        ),
        helper.make_node("Transpose", ["resized"], ["channels last"], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["channels last", "rows"], ["positions"]),
        helper.make_node("Add", ["x", "positions"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 49, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [13, 17, 19])
@pytest.mark.parametrize("dynamic_sizes", [True, False])
@pytest.mark.parametrize("mode", ["cubic", "linear", "nearest"])
def test_resized_position_tables(mode: str, dynamic_sizes: bool, opset: int, tmp_path: Path) -> None:
    """Without constant folding, an optimizer of ONNX Runtime's moves the Transposes, and its Resize takes none such."""
    model = position_table(mode, dynamic_sizes, opset)
    x = np.random.default_rng(1).normal(size=(2, 49, 8)).astype(np.float32)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), plain).run(None, {"x": x})
    (found,) = cpu_session(model, tmp_path).run(None, {"x": x})
    np.testing.assert_array_equal(found, expected)


def test_nodes_of_one_name(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x, bool c) => (float[2] y) {
            [same] a = Relu(x)
            [same] b = Neg(a)
            [same_2] d = Abs(b)
            [same] e = If (c) <then_branch = yes () => (float[2] f) { [n] g = Exp(d)  [n] f = Neg(g) },
                               else_branch = no () => (float[2] h) { [n] h = Neg(d) }>
            y = Neg(e)
        }""")
    x = np.array([1, -2], np.float32)
    (y,) = cpu_session(model, tmp_path).run(None, {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(y, np.exp([1, 0]), rtol=1e-6)
    assert len({node.name for node in model.graph.node}) == 5
