"""Values of tensors, also of those on disk."""

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor


def read_tensor(tensor: ir.TensorProtocol) -> np.ndarray:
    """Values of a tensor; an external one is mapped anew, so that its pages leave memory with the array."""
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8:
        shape = tensor.shape.numpy()
        if 0 in shape:
            return np.empty(shape, tensor.dtype.numpy())
        return np.memmap(
            tensor.path, tensor.dtype.numpy(), "c", offset=tensor.offset or 0, shape=shape or (1,)
        ).reshape(shape)
    return tensor.numpy()


def read_part(tensor: ir.TensorProtocol, index: int) -> np.ndarray:
    """`read_tensor(tensor)[index]`; only that part is computed of a computed tensor."""
    return tensor.part(index) if isinstance(tensor, ComputedTensor) else read_tensor(tensor)[index]


def weights_bytes(graph: ir.Graph) -> int:
    """Bytes of all initializers and Constants of the graph."""
    constants = [
        node.attributes["value"].as_tensor()
        for node in graph
        if node.op_type == "Constant" and "value" in node.attributes
    ]
    initializers = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
    return sum(tensor.nbytes for tensor in (*initializers, *constants))
