"""Malformed models are refused when they are read, by the name of what is wrong: each is an MLP but for one thing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.graph_passes.load.faults import blaming
from trt_nvfp4.graph_passes.load.source import ModelError, load

Change = Callable[[onnx.ModelProto], None]


def weight(model: onnx.ModelProto) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == "gate")


def first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def too_few_values(model: onnx.ModelProto) -> None:
    weight(model).ClearField("raw_data")
    weight(model).float_data.extend([1.0] * 5)


def text_for_numbers(model: onnx.ModelProto) -> None:
    weight(model).ClearField("raw_data")
    weight(model).data_type = TensorProto.STRING
    weight(model).string_data.extend([b"a"] * 3)


def constant(model: onnx.ModelProto, **values: object) -> None:
    model.graph.node.insert(0, helper.make_node("Constant", [], ["k"], name="constant", **values))


def impossible_reshape(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([7, 9]), "seven"))
    model.graph.node.insert(0, helper.make_node("Reshape", ["gate", "seven"], ["reshaped"]))
    first(model, "MatMul").input[1] = "reshaped"


def attribute_without_type(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Transpose", ["gate"], ["t"], name="turn", perm=[1, 0]))
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.UNDEFINED


def attribute_of_a_function(model: onnx.ModelProto) -> None:
    gemm = helper.make_node("Gemm", ["gate", "gate"], ["g"], name="product", transB=1)
    gemm.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="a")
    model.graph.node.insert(0, gemm)


def bytes_for_text(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Einsum", ["gate", "gate"], ["e"], name="sum", equation=b"\xff\xfe"))


def elem_type(value: onnx.ValueInfoProto, number: int) -> None:
    """Past the check of protobuf for Python."""
    value.type.tensor_type.elem_type = number


def node(op: str, inputs: list[str], outputs: list[str], **attributes: int) -> Change:
    return lambda m: m.graph.node.insert(0, helper.make_node(op, inputs, outputs, name="odd", **attributes))


CASES: dict[str, tuple[Change, str]] = {
    "too few values": (too_few_values, "tensor 'gate' of shape .* needs .* values"),
    "text for numbers": (text_for_numbers, "tensor 'gate' of shape .* needs .* values"),
    "Einsum without its operand": (
        lambda m: m.graph.node.insert(0, helper.make_node("Einsum", ["gate"], ["e"], equation="bk,kn->bn")),
        "equation 'bk,kn->bn' does not fit its 1 inputs",
    ),
    "missing input": (lambda m: first(m, "MatMul").input.pop(), "has 1 inputs, expected 2"),
    "nameless input": (lambda m: first(m, "MatMul").input.__setitem__(1, ""), r"input 1 \(B\) is missing"),
    "Cast to nothing": (
        lambda m: m.graph.node.insert(0, helper.make_node("Cast", ["gate"], ["c"], name="cast")),
        r"node 'cast' \(Cast\): attribute 'to' is missing",
    ),
    "Constant of nothing": (lambda m: constant(m), "node 'constant' .*: has 0 attributes, expected one"),
    "Constant of two": (lambda m: constant(m, value_int=1, axis=0), "node 'constant' .*: has 2 attributes"),
    "impossible Reshape": (impossible_reshape, "ONNX cannot process the model: .*Reshape|not valid ONNX"),
    "no attribute type": (attribute_without_type, "node 'turn' .*: attribute 'perm' has no value of a known type"),
    "a function's attribute": (attribute_of_a_function, "node 'product' .*: attribute 'alpha' is one of a function"),
    "bytes for text": (bytes_for_text, "node 'sum' .*: attribute 'equation' is not UTF-8 text"),
    "Split with more outputs": (
        node("Split", ["gate"], ["s0", "s1", "s2"], num_outputs=2),
        r"node 'odd' \(Split\): num_outputs is 2, but it has 3",
    ),
    "Split with fewer outputs": (node("Split", ["gate"], ["s0"], num_outputs=2), "num_outputs is 2, but it has 1"),
    "batches of no GatherND": (
        node("GatherND", ["gate", "gate"], ["g"], batch_dims=-2),
        r"node 'odd' \(GatherND\): batch_dims is -2",
    ),
    "input without a type": (lambda m: m.graph.input[0].ClearField("type"), "input 'x' has no element type"),
    "input of an unknown type": (lambda m: elem_type(m.graph.input[0], 255), "value 'x' is of type 255, which ONNX"),
    "output of an unknown type": (lambda m: elem_type(m.graph.output[0], -2), "value 'y' is of type -2, which ONNX"),
    "nameless output": (lambda m: m.graph.output.add(), "an input or output of the graph has no name"),
    "output of nothing": (lambda m: setattr(m.graph.output[0], "name", "z"), "nothing produces the graph output 'z'"),
}


@pytest.mark.parametrize("kind", CASES)
def test_refused(kind: str, tmp_path: Path) -> None:
    change, message = CASES[kind]
    model, _ = mlp_model(spec())
    change(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=rf"model\.onnx: .*{message}|model\.onnx: {message}"), blaming(path):
        load(path)


def failing() -> None:
    raise KeyError("nobody foresaw this")


def test_a_defect_stays_one_where_the_model_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mlp_model(spec())[0], path)
    with pytest.raises(KeyError, match="foresaw"), blaming(path):
        failing()


def test_where_the_model_is_not_valid_it_is_named(tmp_path: Path) -> None:
    model, _ = mlp_model(spec())
    model.graph.name = ""  # which nothing here minds
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    load(path)
    with pytest.raises(ModelError, match=r"model\.onnx: not valid ONNX: .*name.* of 'graph'"), blaming(path):
        failing()


def test_how_nodes_are_spread_over_devices_is_of_no_use(tmp_path: Path) -> None:
    """ONNX's checker takes such entries without an id, and its readers fail over them."""
    model, _ = mlp_model(spec())
    first(model, "MatMul").device_configurations.add()
    model.configuration.add(num_devices=2)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = ir.to_proto(load(path).ir_model)
    assert not any(node.device_configurations for node in loaded.graph.node)
