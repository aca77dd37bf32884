"""Constants that onnxscript's optimizer takes for 0 or 1 because they are near, kept out of its sight.

Its patterns x + 0 and x * 1 match by a tolerance, so that a norm's epsilon of 1e-8 disappears.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor, replace_all_uses_with
from onnx_ir.passes import common as passes

# Distance from 0 and from 1 at which a constant is hidden; onnxscript's tolerances are a tenth of it.
_NEAR = {0: 1e-7, 1: 1e-4}
_MADE = "near"


@contextmanager
def exact_constants(model: ir.Model) -> Iterator[None]:
    """Within, scalars near 0 or 1 that are neither are inputs of `model`, whose functions are inlined; then constants
    again, by which what they meet is folded."""
    from onnxscript import optimizer

    passes.InlinePass()(model)
    hidden: dict[ir.Value, ir.TensorProtocol] = {}
    for value in _constants(model.graph):
        tensor = get_const_tensor(value)
        if tensor is None or not _is_near(tensor):
            continue
        made = ir.val(f"{_MADE}.{len(hidden)}.{value.name}", dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()))
        replace_all_uses_with(value, made)
        hidden[made] = tensor
    model.graph.inputs.extend(hidden)
    yield
    for value, tensor in hidden.items():
        model.graph.inputs.remove(value)
        if not value.uses():
            continue
        value.const_value = ir.tensor(tensor.numpy(), tensor.dtype, name=value.name)
        model.graph.register_initializer(value)
    if hidden:
        optimizer.fold_constants_ir(model, input_size_limit=1)


def _constants(graph: ir.Graph) -> list[ir.Value]:
    made = [node.outputs[0] for node in graph.all_nodes() if node.op_type == "Constant" and not node.domain]
    return [value for value in (*graph.initializers.values(), *made) if not value.is_graph_output()]


def _is_near(tensor: ir.TensorProtocol) -> bool:
    if tensor.size != 1 or not tensor.dtype.is_floating_point():
        return False
    value = float(np.asarray(tensor.numpy(), np.float64).reshape(()))
    return any(0 < abs(value - exact) < distance for exact, distance in _NEAR.items())
