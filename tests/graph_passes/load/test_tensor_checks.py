"""Tensors that do not hold what their shape and type need are refused, wherever they are and however they store it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.graph_passes.load.source import ModelError, load
from trt_nvfp4.graph_passes.load.tensor_checks import check_tensors

TYPES = sorted(set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED})


def test_a_weight_without_values(tmp_path: Path) -> None:
    """It would be read as zeros."""
    model, _ = mlp_model(spec())
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "gate")
    weight.ClearField("raw_data")
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"model\.onnx: tensor 'gate' of shape .* values in its \w+, it has 0"):
        load(tmp_path / "model.onnx")


def test_negative_dimensions_do_not_end_the_process(tmp_path: Path) -> None:
    """As many bytes as the product of the dimensions needs; ONNX's shape inference of a Slice would abort."""
    model, _ = mlp_model(spec())
    bad = numpy_helper.from_array(np.zeros((64, 32), np.float32), "bad")
    bad.dims[:] = [-64, -32]
    ends = [numpy_helper.from_array(np.array([n]), name) for name, n in (("start", 0), ("end", 32))]
    model.graph.initializer.extend([bad, *ends])
    model.graph.node.append(helper.make_node("Slice", ["bad", "start", "end"], ["part"]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"tensor 'bad' has a negative dimension: \[-64, -32\]"):
        load(tmp_path / "model.onnx")


def of_typed_field(data_type: int, dims: list[int]) -> TensorProto:
    """A tensor as ONNX's own helper stores it, outside raw_data."""
    count = int(np.prod(dims))
    values = [b"a"] * count if data_type == TensorProto.STRING else [1] * count
    return helper.make_tensor("w", data_type, dims, values)


def model_of(tensor: TensorProto, where: str) -> onnx.ModelProto:
    """A model that has `tensor` as an initializer, as a Constant or in the body of an If."""
    output = [helper.make_tensor_value_info("y", tensor.data_type, None)]
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    if where == "initializer":
        nodes, weights = [helper.make_node("Identity", ["w"], ["y"])], [tensor]
    elif where == "Constant":
        nodes, weights = [constant, helper.make_node("Identity", ["w"], ["y"])], []
    else:
        body = helper.make_graph([constant], "body", [], [helper.make_tensor_value_info("w", tensor.data_type, None)])
        nodes = [helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body)]
        weights = [numpy_helper.from_array(np.array(True), "condition")]
    return helper.make_model(helper.make_graph(nodes, "g", [], output, weights))


@pytest.mark.parametrize("dims", [[], [3], [2, 5], [0, 4]], ids=str)
@pytest.mark.parametrize("data_type", TYPES, ids=TensorProto.DataType.Name)
def test_typed_fields(data_type: int, dims: list[int]) -> None:
    """What ONNX itself writes passes; one entry more or fewer does not."""
    where = "initializer"
    check_tensors(model_of(of_typed_field(data_type, dims), where))
    more = of_typed_field(data_type, dims)
    field = getattr(more, helper.tensor_dtype_to_field(data_type))
    field.append(b"a" if data_type == TensorProto.STRING else 1)
    with pytest.raises(ValueError, match=r"tensor 'w' of shape \[.*\] needs \d+ values"):
        check_tensors(model_of(more, where))
    fewer = of_typed_field(data_type, dims)
    if 0 not in dims:
        getattr(fewer, helper.tensor_dtype_to_field(data_type)).pop()
        with pytest.raises(ValueError, match="tensor 'w' of shape"):
            check_tensors(model_of(fewer, where))


@pytest.mark.parametrize("where", ["initializer", "Constant", "If"])
@pytest.mark.parametrize("damage", ["no values", "another field", "raw too short", "negative", "no type"])
def test_wherever_the_tensor_is(damage: str, where: str) -> None:
    tensor = numpy_helper.from_array(np.ones((4, 6), np.float32), "w")
    if damage == "no type":
        tensor.data_type = TensorProto.UNDEFINED
        tensor.ClearField("raw_data")
    elif damage == "negative":
        tensor.dims[:] = [-4, -6]
    elif damage == "raw too short":
        tensor.raw_data = tensor.raw_data[:-1]
    else:
        tensor.ClearField("raw_data")
        if damage == "another field":
            tensor.data_type = TensorProto.BFLOAT16
            tensor.float_data.extend([1.0] * 24)
    with pytest.raises(ValueError, match="tensor 'w'"):
        check_tensors(model_of(tensor, where))
