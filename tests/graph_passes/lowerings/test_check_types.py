"""Operands of different types are reported by node, before TensorRT reads the model."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.lowerings.check_types import check_types


def model(to: int) -> ir.Model:
    """Joins x, of float32, and x in the type `to`."""
    nodes = [
        helper.make_node("Cast", ["x"], ["other"], to=to),
        helper.make_node("Identity", ["other"], ["same"]),
        helper.make_node("Concat", ["x", "same"], ["y"], "join", axis=0),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    return ir.from_proto(
        helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 22)])
    )


def test_mixed_operands() -> None:
    check_types(model(TensorProto.FLOAT))
    words = r"node 'join' \(Concat\) .* tensor 'x' of type float and 'same' of type bfloat16"
    with pytest.raises(ModelError, match=words):
        check_types(model(TensorProto.BFLOAT16))
