"""Follows dimensions through a graph, and takes shape arithmetic off the tensors that the passes want to replace.

TorchScript computes the sizes of Slices and Reshapes at run time, from the Shape of the very tensors inside an MLP. Where such
a size is known it becomes a constant; where it equals a dimension of an earlier tensor it is read from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.linear_pattern import attribute, is_op

# Each output dimension of these is that of their broadcast inputs.
_BROADCASTING = frozenset(
    "Abs Add Cast Clip Div Dropout Elu Erf Exp Gelu HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Max Min Mish Mul Neg "
    "Pow RMSNormalization Reciprocal Relu Selu Sigmoid Softmax Softplus Sqrt Sub Swish Tanh Where".split()
)
_ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: int(a / b),
}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
# Longer integer tensors are no shapes.
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
    constant = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(constant)
    output.replace_all_uses_with(constant)


def _read_earlier(graph: ir.Graph, node: ir.Node, integers: Integers) -> None:
    """Gather(Shape(late), i) -> Gather(Shape(early), axis)."""
    shape = node.inputs[0].producer() if node.inputs[0] is not None else None
    (dim,) = integers.elements
    if not is_op(shape, "Shape") or not isinstance(dim, Dim) or shape.inputs[0] is dim.value:
        return
    early = ir.node("Shape", [dim.value], name=f"{node.name}.shape")
    index = ir.Tensor(np.array(dim.axis if integers.scalar else [dim.axis]), name=f"{node.name}.axis")
    constant = ir.Value(name=index.name, shape=index.shape, type=ir.TensorType(index.dtype), const_value=index)
    graph.register_initializer(constant)
    early.outputs[0].name, early.outputs[0].type = f"{node.name}.shape", ir.TensorType(ir.DataType.INT64)
    graph.insert_before(node, early)
    node.replace_input_with(0, early.outputs[0])
    node.replace_input_with(1, constant)


class _Flow:
    """Dimensions of every tensor and elements of every small integer tensor, node by node."""

    def __init__(self) -> None:
        self._dims: dict[ir.Value, tuple[Element, ...]] = {}
        self._integers: dict[ir.Value, Integers] = {}

    def dims(self, value: ir.Value) -> tuple[Element, ...] | None:
        """The dimensions of `value`, or None where its rank is unknown."""
        if value in self._dims:
            return self._dims[value]
        shape = value.shape
        if shape is None:
            tensor = get_const_tensor(value)
            shape = None if tensor is None else tensor.shape
        if shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else Dim(value, axis) for axis, dim in enumerate(shape))

    def integers(self, value: ir.Value | None) -> Integers | None:
        """The elements of `value`, or None where it is no small integer tensor that can be followed."""
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
        if node.domain not in ("", "ai.onnx"):
            return
        integers = self._compute(node)
        if integers is not None and len(integers.elements) <= _MAX_INTEGERS:
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
        first = None if not node.inputs or node.inputs[0] is None else self.dims(node.inputs[0])
        if node.op_type in _BROADCASTING:
            return self._broadcast(node, output)
        if first is None:
            return None
        if is_op(node, "MatMul"):
            second = self.dims(node.inputs[1])
            return (*first[:-1], second[1]) if second is not None and len(second) == 2 else None
        if is_op(node, "Gemm"):
            second = self.dims(node.inputs[1])
            transposed = bool(attribute(node, "transB", 0))
            rows = first[1 if attribute(node, "transA", 0) else 0]
            return None if second is None else (rows, second[0 if transposed else 1])
        if is_op(node, "Reshape"):
            target = self.integers(node.inputs[1])
            if target is None:
                return None
            copies = not attribute(node, "allowzero", 0)
            return tuple(
                Dim(output, i) if e == -1 or (e == 0 and (not copies or i >= len(first))) else first[i] if e == 0 else e
                for i, e in enumerate(target.elements)
            )
        if is_op(node, "Split", "Slice"):
            axes = [attribute(node, "axis", 0)] if node.op_type == "Split" else None
            if (
                axes is None
                and len(node.inputs) > 3
                and (found := self.integers(node.inputs[3])) is not None
                and found.known
            ):
                axes = list(found.elements)
            if axes is None:
                return None
            cut = {int(axis) % len(first) for axis in axes}  # type: ignore[call-overload]
            return tuple(Dim(output, i) if i in cut else dim for i, dim in enumerate(first))
        return None

    def _broadcast(self, node: ir.Node, output: ir.Value) -> tuple[Element, ...] | None:
        shapes = [self.dims(value) for value in node.inputs if value is not None]
        if is_op(node, "Dropout", "LayerNormalization", "RMSNormalization"):
            shapes = shapes[:1]
        if not shapes or any(shape is None for shape in shapes):
            return None
        rank = max(len(shape) for shape in shapes)  # type: ignore[arg-type]
        result: list[Element] = []
        for axis in range(rank):
            sizes = {s[axis - rank] for s in shapes if s is not None and rank - axis <= len(s)} - {1}
            result.append(sizes.pop() if len(sizes) == 1 else Dim(output, axis) if sizes else 1)
        return tuple(result)

    def _compute(self, node: ir.Node) -> Integers | None:
        if is_op(node, "Shape"):
            dims = self.dims(node.inputs[0])
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return None if dims is None else Integers(dims[part])
        inputs = [self.integers(value) for value in node.inputs]
        if not inputs or any(operand is None for operand in inputs):
            return None
        first = inputs[0]
        assert first is not None
        if is_op(node, "Identity", "Cast"):
            return first if node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32) else None
        if is_op(node, "Unsqueeze"):
            return Integers(first.elements) if first.scalar else None
        if is_op(node, "Squeeze"):
            return Integers(first.elements, scalar=True) if len(first.elements) == 1 else None
        if is_op(node, "Concat"):
            return Integers(tuple(element for operand in inputs for element in operand.elements))  # type: ignore[union-attr]
        if is_op(node, "Gather", "Slice") and all(operand.known for operand in inputs[1:]):  # type: ignore[union-attr]
            return self._select(node, first, [operand.elements for operand in inputs[1:]], inputs[1].scalar)  # type: ignore
        if node.op_type in _ARITHMETIC and len(inputs) == 2 and all(len(o.elements) == 1 for o in inputs):  # type: ignore
            a, b = first.elements[0], inputs[1].elements[0]  # type: ignore[union-attr]
            scalar = first.scalar and inputs[1].scalar  # type: ignore[union-attr]
            if isinstance(a, int) and isinstance(b, int) and not (node.op_type == "Div" and b == 0):
                return Integers((_ARITHMETIC[node.op_type](a, b),), scalar)
            if b == _NEUTRAL[node.op_type]:
                return Integers((a,), scalar)
        return None

    @staticmethod
    def _select(node: ir.Node, data: Integers, operands: list[tuple[Element, ...]], scalar: bool) -> Integers | None:
        numbers = [[int(element) for element in operand] for operand in operands]  # type: ignore[call-overload]
        size = len(data.elements)
        if data.scalar:
            return None
        if is_op(node, "Gather"):
            if any(not -size <= index < size for index in numbers[0]):
                return None
            return Integers(tuple(data.elements[index] for index in numbers[0]), scalar)
        if any(len(operand) != 1 for operand in numbers):
            return None
        starts, stops = numbers[:2]
        step = numbers[3][0] if len(numbers) > 3 else 1
        return Integers(data.elements[starts[0] : stops[0] : step])
