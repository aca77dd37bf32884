"""Dimensions that are declared negative, or by a name that says nothing, are dynamic ones of which nothing is known."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.calibration.samples.samples import input_specs
from trt_nvfp4.graph_passes.load.source import load


def model_with_a_slice(rows: int | str, inner: int | str) -> onnx.ModelProto:
    """x [rows, 32] and an MLP of it, [inner, 32] by the model's own word; parts of both are outputs."""
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in (("w", (32, 64)), ("v", (64, 32)))
    ]
    weights += [numpy_helper.from_array(np.array([n]), name) for name, n in (("start", 0), ("end", 8))]
    nodes = [
        *(helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["b"])),
        helper.make_node("MatMul", ["b", "v"], ["y"]),
        *(helper.make_node("Slice", [source, "start", "end"], [f"part of {source}"]) for source in "xy"),
    ]
    outputs = [helper.make_empty_tensor_value_info(f"part of {source}") for source in "xy"]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [d, 32]) for n, d in (("x", rows), ("y", inner)))
    graph = helper.make_graph(nodes, "g", [x], outputs, weights, value_info=[y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("rows", [-1, -(2**62), "batch"], ids=str)
@pytest.mark.parametrize("inner", [-5, "batch"], ids=str)
def test_negative_dimensions_are_dynamic(rows: int | str, inner: int | str, tmp_path: Path) -> None:
    """ONNX's shape inference of a Slice would end the process."""
    onnx.save(model_with_a_slice(rows, inner), tmp_path / "model.onnx")
    (x,) = load(tmp_path / "model.onnx").graph.inputs
    assert x.shape is not None
    assert not isinstance(x.shape[0], int)
    assert x.shape[1] == 32


@pytest.mark.parametrize("name", ["?", "", "None", "-1"])
def test_dimensions_of_a_name_that_says_nothing_need_not_be_equal(name: str, tmp_path: Path) -> None:
    """TensorRT refuses inputs whose dimensions of one name differ."""
    kernel = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "k")
    node = helper.make_node("Conv", ["x", "k"], ["y"])
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", c, name, name]) for n, c in (("x", 3), ("y", 4))
    )
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [kernel]), opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.save(model, tmp_path / "model.onnx")
    assert input_specs(tmp_path / "model.onnx")["x"].shape == ("batch", 3, "", "")
    for values in (load(tmp_path / "model.onnx").graph.inputs, load(tmp_path / "model.onnx").graph.outputs):
        assert values[0].shape is not None
        assert values[0].shape[0] == "batch"
        height, width = values[0].shape[2:]
        assert height != width or height == ir.SymbolicDim(None)  # nameless ones are equal to each other alone
