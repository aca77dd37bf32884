"""What can be proved about shapes without running the model."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.linear_pattern import attribute, is_op


def last_dimension(value: ir.Value) -> int | None:
    """The declared size of the last axis, if it is a number."""
    if value.shape is None or len(value.shape) == 0:
        return None
    dim = value.shape[-1]
    return dim if isinstance(dim, int) else None


def keeps_last_axis(node: ir.Node, features: int) -> bool:
    """A Reshape, Flatten, Squeeze or Unsqueeze of [..., features] that provably gives [..., features]."""
    if last_dimension(node.outputs[0]) == features:
        return True
    if is_op(node, "Reshape"):
        return _last_element(node.inputs[1]) == features
    if is_op(node, "Flatten"):
        rank = None if node.inputs[0].shape is None else len(node.inputs[0].shape)
        return attribute(node, "axis", 1) in (-1, None if rank is None else rank - 1)
    return False


def _last_element(shape: ir.Value | None) -> int | None:
    """The last element of an integer vector that is constant or ends in a constant part of a Concat."""
    while shape is not None:
        tensor = get_const_tensor(shape)
        if tensor is not None:
            elements = tensor.numpy().reshape(-1)
            return int(elements[-1]) if elements.size else None
        node = shape.producer()
        if not is_op(node, "Concat"):
            return None
        shape = node.inputs[-1]
    return None
