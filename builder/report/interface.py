"""A model's inputs and outputs in words."""

import onnx

_TYPES = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}


def interface(model: onnx.ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs by name, each as type and dimensions: `int64 [batch, sequence]`."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: described(value) for value in model.graph.input if value.name not in weights}
    return inputs, {value.name: described(value) for value in model.graph.output}


def described(value: onnx.ValueInfoProto) -> str:
    """Type and dimensions; "?" for one of which nothing is known."""
    if (kind := value.type.WhichOneof("value")) != "tensor_type":
        return (kind or "undefined").removesuffix("_type")
    tensor = value.type.tensor_type
    dims = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    return f"{_TYPES.get(tensor.elem_type, f'type {tensor.elem_type}')} [{', '.join(dims)}]"
