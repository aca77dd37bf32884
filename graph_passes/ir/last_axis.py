"""Whether a Reshape and its kin keep the last axis."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand, rank

RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


def keeps_last_axis(node: ir.Node, features: int) -> bool:
    """A Reshape, Flatten, Squeeze or Unsqueeze of [..., features] that provably gives [..., features]."""
    output = node.outputs[0]
    if output.shape is not None and len(output.shape) > 0 and isinstance(output.shape[-1], int):
        return output.shape[-1] == features
    if is_op(node, "Reshape"):
        return _last_element(operand(node, 1)) == features
    if is_op(node, "Flatten"):
        dimensions = rank(operand(node, 0))
        axis = node.attributes.get_int("axis", 1)
        return axis == -1 or (dimensions is not None and axis == dimensions - 1)
    return False


def _last_element(shape: ir.Value) -> int | None:
    """The last element of an integer vector that is constant or ends in a constant part of a Concat."""
    elements = constant_integers(shape)
    while elements is None:
        node = shape.producer()
        if not is_op(node, "Concat"):
            return None
        shape = operand(node, len(node.inputs) - 1)
        elements = constant_integers(shape)
    return elements[-1] if elements else None
