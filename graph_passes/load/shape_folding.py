"""Follows dimensions through a graph, and takes shape arithmetic off the tensors that the passes want to replace.

TorchScript computes the sizes of Slices and Reshapes at run time, from the Shape of the very tensors inside an MLP.
Where such a size is known it becomes a constant; where it equals a dimension of an earlier tensor it is read there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand, optional_operand, register

# Each output dimension of these is that of their broadcast inputs.
_BROADCASTING = (
    *("Abs", "Add", "Cast", "Clip", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
    *("Identity", "LayerNormalization", "LeakyRelu", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "RMSNormalization"),
    *("Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where"),
)
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    # Towards zero, and exact where float64 is not.
    "Div": lambda a, b: a // b if (a < 0) == (b < 0) else -(-a // b),
}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
# Longer integer tensors are not shapes.
_MAX_INTEGERS = 16


@dataclass(frozen=True)
class Dim:
    """An unknown size: that of `value` along `axis`."""

    value: ir.Value
    axis: int


Element = int | Dim


@dataclass(frozen=True)
class Integers:
    """The elements of an integer scalar or vector."""

    elements: tuple[Element, ...]
    scalar: bool = False

    @property
    def known(self) -> bool:
        """All elements are numbers."""
        return all(isinstance(element, int) for element in self.elements)


def simplify_shapes(graph: ir.Graph) -> None:
    """Replaces known integers by constants, and dimensions by those of the earliest tensor that has them, in place."""
    flow = _Flow()
    for node in list(graph):
        flow.visit(node)
        for output in node.outputs:
            integers = flow.integers(output)
            if integers is None or output.is_graph_output() or node.op_type == "Constant":
                continue
            if integers.known:
                _replace_by_constant(graph, output, integers)
            elif is_op(node, "Gather") and len(integers.elements) == 1:
                _read_earlier(graph, node, integers)


def _replace_by_constant(graph: ir.Graph, output: ir.Value, integers: Integers) -> None:
    elements = integers.elements[0] if integers.scalar else integers.elements
    dtype = output.dtype or ir.DataType.INT64
    tensor = ir.Tensor(np.array(elements, dtype.numpy()), name=f"{output.name}.known")
    constant = ir.val(tensor.name, const_value=tensor)
    register(graph, constant)
    output.replace_all_uses_with(constant)


def _read_earlier(graph: ir.Graph, node: ir.Node, integers: Integers) -> None:
    """Gather(Shape(late), i) -> Gather(Shape(early), axis)."""
    shape = operand(node, 0).producer()
    (dim,) = integers.elements
    if not is_op(shape, "Shape") or not isinstance(dim, Dim) or operand(shape, 0) is dim.value:
        return
    early = ir.node("Shape", [dim.value], name=f"{node.name}.shape")
    index = ir.Tensor(np.array(dim.axis if integers.scalar else [dim.axis]), name=f"{node.name}.axis")
    constant = ir.val(index.name, const_value=index)
    register(graph, constant)
    early.outputs[0].name, early.outputs[0].type = f"{node.name}.shape", ir.TensorType(ir.DataType.INT64)
    graph.insert_before(node, early)
    node.replace_input_with(0, early.outputs[0])
    node.replace_input_with(1, constant)


def _fits(integers: Integers, output: ir.Value) -> bool:
    """`output` has one of the types that sizes have, and its arithmetic does not wrap around."""
    dtype = output.dtype or ir.DataType.INT64
    if dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return False
    limits = np.iinfo(dtype.numpy())
    return all(limits.min <= element <= limits.max for element in integers.elements if isinstance(element, int))


class _Flow:
    """Dimensions of every tensor and elements of every small integer tensor, node by node."""

    def __init__(self) -> None:
        self._dims: dict[ir.Value, tuple[Element, ...]] = {}
        self._integers: dict[ir.Value, Integers] = {}

    def dims(self, value: ir.Value) -> tuple[Element, ...] | None:
        """The dimensions of `value`, or None where its rank is unknown."""
        if value in self._dims:
            return self._dims[value]
        tensor = get_const_tensor(value)
        shape = value.shape if tensor is None else tensor.shape
        if shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else Dim(value, axis) for axis, dim in enumerate(shape))

    def integers(self, value: ir.Value | None) -> Integers | None:
        """The elements of `value`; None unless it is a small integer tensor that can be followed."""
        if value is None:
            return None
        if value not in self._integers:
            tensor = get_const_tensor(value)
            if tensor is None or not tensor.dtype.is_integer() or len(tensor.shape) > 1 or tensor.size > _MAX_INTEGERS:
                return None
            array = np.asarray(tensor.numpy())
            self._integers[value] = Integers(tuple(int(number) for number in array.reshape(-1)), array.ndim == 0)
        return self._integers[value]

    def visit(self, node: ir.Node) -> None:
        """Works out what `node` computes, given what is known of its inputs."""
        integers = self._compute(node)
        if integers is not None and 0 < len(integers.elements) <= _MAX_INTEGERS and _fits(integers, node.outputs[0]):
            self._integers[node.outputs[0]] = integers
        for output in node.outputs:
            derived = self._derive(node, output)
            declared = self.dims(output)
            if derived is not None and (declared is None or len(declared) == len(derived)):
                self._dims[output] = tuple(
                    declared[i] if declared is not None and isinstance(declared[i], int) else dim
                    for i, dim in enumerate(derived)
                )

    def _derive(self, node: ir.Node, output: ir.Value) -> tuple[Element, ...] | None:
        if is_op(node, *_BROADCASTING):
            return self._broadcast(node, output)
        if not is_op(node, "MatMul", "Gemm", "Reshape", "Split", "Slice"):
            return None
        first = self.dims(operand(node, 0))
        if not first:
            return None
        if is_op(node, "Split"):
            return self._cut(output, first, [node.attributes.get_int("axis", 0)])
        if is_op(node, "Slice"):
            axes = constant_integers(optional_operand(node, 3))
            return None if axes is None else self._cut(output, first, axes)
        if is_op(node, "Reshape"):
            target = self.integers(operand(node, 1))
            return None if target is None else self._reshape(node, output, first, target)
        second = self.dims(operand(node, 1))
        if second is None or len(second) != 2:
            return None
        if is_op(node, "MatMul"):
            return (*first[:-1], second[1])
        if len(first) != 2:
            return None
        return first[bool(node.attributes.get_int("transA", 0))], second[not node.attributes.get_int("transB", 0)]

    @staticmethod
    def _cut(output: ir.Value, dims: tuple[Element, ...], axes: list[int]) -> tuple[Element, ...]:
        cut = {axis % len(dims) for axis in axes}
        return tuple(Dim(output, axis) if axis in cut else dim for axis, dim in enumerate(dims))

    @staticmethod
    def _reshape(
        node: ir.Node, output: ir.Value, dims: tuple[Element, ...], target: Integers
    ) -> tuple[Element, ...] | None:
        copies = not node.attributes.get_int("allowzero", 0)  # 0 stands for the input's dimension
        result: list[Element] = []
        for axis, element in enumerate(target.elements):
            if element == 0 and copies and axis < len(dims):
                result.append(dims[axis])
            else:
                result.append(Dim(output, axis) if element in (0, -1) else element)
        return tuple(result)

    def _broadcast(self, node: ir.Node, output: ir.Value) -> tuple[Element, ...] | None:
        values = [value for value in node.inputs if value is not None]
        if is_op(node, "Dropout", "LayerNormalization", "RMSNormalization"):
            values = values[:1]
        shapes = []
        for value in values:
            dims = self.dims(value)
            if dims is None:
                return None
            shapes.append(dims)
        rank = max(map(len, shapes))
        result: list[Element] = []
        for axis in range(-rank, 0):
            sizes = {dims[axis] for dims in shapes if -axis <= len(dims)} - {1}
            result.append(sizes.pop() if len(sizes) == 1 else Dim(output, axis + rank) if sizes else 1)
        return tuple(result)

    def _compute(self, node: ir.Node) -> Integers | None:
        if is_op(node, "Shape"):
            dims = self.dims(operand(node, 0))
            part = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end"))
            return None if dims is None else Integers(dims[part])
        operands = [self.integers(value) for value in node.inputs if value is not None]
        inputs = [integers for integers in operands if integers is not None]
        if not inputs or len(inputs) != len(operands):
            return None
        first, rest = inputs[0], inputs[1:]
        if is_op(node, "Identity", "Cast"):
            return first if node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32) else None
        if is_op(node, "Unsqueeze"):
            return Integers(first.elements) if first.scalar and len(rest[0].elements) == 1 else None
        if is_op(node, "Squeeze"):
            return Integers(first.elements, scalar=True) if len(first.elements) == 1 else None
        if is_op(node, "Concat"):
            return Integers(tuple(element for integers in inputs for element in integers.elements))
        if is_op(node, "Gather", "Slice") and not first.scalar:
            return self._select(node, first, rest)
        if is_op(node, *_ARITHMETIC) and len(first.elements) == len(rest[0].elements) == 1:
            return self._arithmetic(node.op_type, first, rest[0])
        return None

    @staticmethod
    def _select(node: ir.Node, data: Integers, rest: list[Integers]) -> Integers | None:
        numbers = [[element for element in integers.elements if isinstance(element, int)] for integers in rest]
        if any(len(found) != len(integers.elements) for found, integers in zip(numbers, rest, strict=True)):
            return None
        if is_op(node, "Gather"):
            size = len(data.elements)
            if any(not -size <= index < size for index in numbers[0]):
                return None
            return Integers(tuple(data.elements[index] for index in numbers[0]), rest[0].scalar)
        if any(len(found) != 1 for found in numbers):
            return None
        step = 1 if optional_operand(node, 4) is None else numbers[-1][0]
        return Integers(data.elements[numbers[0][0] : numbers[1][0] : step])

    @staticmethod
    def _arithmetic(op_type: str, left: Integers, right: Integers) -> Integers | None:
        (a,), (b,) = left.elements, right.elements
        scalar = left.scalar and right.scalar
        if isinstance(a, int) and isinstance(b, int):
            return None if op_type == "Div" and b == 0 else Integers((_ARITHMETIC[op_type](a, b),), scalar)
        return Integers((a,), scalar) if b == _NEUTRAL[op_type] else None
