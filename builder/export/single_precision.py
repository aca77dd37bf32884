"""float64 in a network becomes float32: TensorRT has no wider type.

Rotary embeddings of diffusion models are computed in float64. What of it depends on no input has been folded before.
"""

import numpy as np
import onnx_ir as ir


def to_single_precision(model: ir.Model) -> None:
    """Give all float64 tensors of the model float32, inputs and outputs included."""
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, _single(attribute.as_tensor()))
            elif name in ("to", "dtype") and attribute.value == ir.DataType.DOUBLE:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        for value in node.outputs:
            _narrow(value)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        _narrow(value)


def _narrow(value: ir.Value) -> None:
    if value.dtype == ir.DataType.DOUBLE:
        value.dtype = ir.DataType.FLOAT
    tensor = value.const_value
    if tensor is not None:
        value.const_value = _single(tensor)


def _single(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if tensor.dtype != ir.DataType.DOUBLE:
        return tensor
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
