"""Whether the values of an elementwise region have one shape: broadcasting ones do not act on each element."""

from collections.abc import Hashable, Iterable

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.last_axis import RESHAPES
from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand, rank


def have_one_shape(nodes: Iterable[ir.Node], leaves: Iterable[ir.Value]) -> bool:
    """Whether all values that `nodes`, in order, compute from `leaves` of one shape have that shape where two meet.

    Constants have one element each; such a one may still add dimensions. Reshapes keep the last axis.
    """
    leaves = list(leaves)
    whole: Hashable = "matrix" if any(rank(leaf) == 2 for leaf in leaves) else ()
    shapes = dict.fromkeys(leaves, whole)  # by what reshaped them; all matrices are [rows, features]
    for node in nodes:
        parts = [value for value in node.inputs if value in shapes]
        if not parts:
            continue  # of constants only
        shape, output = shapes[parts[0]], node.outputs[0]
        if is_op(node, *RESHAPES):
            shape = "matrix" if rank(output) == 2 else (shape, _numbers(node))
        else:
            most = max(_dimensions(value) for value in (None, *node.inputs) if value not in shapes)
            if most > (rank(parts[0]) or 1) or any(shapes[part] != shape for part in parts):
                return False
        shapes[output] = shape
    return True


def _numbers(reshape: ir.Node) -> Hashable:
    """The constant operands and attributes of a reshaping node."""
    operands = [operand(reshape, index) for index in range(1, len(reshape.inputs))]
    numbers = [constant_integers(value) for value in operands]
    known = (value if found is None else tuple(found) for value, found in zip(operands, numbers, strict=True))
    return reshape.op_type, *known, *((name, reshape.attributes.get_int(name)) for name in sorted(reshape.attributes))


def _dimensions(value: ir.Value | None) -> int:
    """Those of a constant, or of what is computed from constants; none where an input is absent."""
    if value is None:
        return 0
    tensor = get_const_tensor(value)
    return (rank(value) or 0) if tensor is None else len(tensor.shape)
