"""Checks the types that a model's inputs, outputs and intermediate values are declared with."""

import onnx

from trt_nvfp4.common.nested_graphs import nested

_TYPES = frozenset(onnx.TensorProto.DataType.values())


def check_values(proto: onnx.ModelProto) -> None:
    """Checks every declared value of `proto`, those in bodies too.

    Raises:
        ValueError: a type that ONNX does not know; an input or output of the model without one. The message names the
            value.
    """
    constants = {tensor.name for tensor in proto.graph.initializer}
    needed = [value for value in proto.graph.input if value.name not in constants]
    for value in needed:
        if _element_type(value) == onnx.TensorProto.UNDEFINED:
            raise ValueError(f"input '{value.name}' has no element type; export the model with it")
    for graph in nested(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if (found := _element_type(value)) is not None and found not in _TYPES:
                raise ValueError(f"value '{value.name}' is of type {found}, which ONNX does not know")


def _element_type(value: onnx.ValueInfoProto) -> int | None:
    """The element type of a tensor, or of a value without a type; None for sequences, maps and optional values."""
    kind = value.type.WhichOneof("value")
    return value.type.tensor_type.elem_type if kind in ("tensor_type", None) else None
