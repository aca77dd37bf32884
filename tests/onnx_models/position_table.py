"""Positions of a vision transformer, as exporters write them."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


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
