"""Sessions compute what ONNX Runtime computes without any optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

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
