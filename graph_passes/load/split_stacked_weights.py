"""Makes a weight of each part that constant indices pick from a stored tensor: matrices of a stack [experts, ...], as
TorchScript has them (a loop over all experts of a stack, of which torch's other exporter leaves Gathers, is then one
over modules), and rows of a matrix or vector, as torch.nn.MultiheadAttention has those of its three projections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, constant_integers, is_op, operand, register
from trt_nvfp4.graph_passes.load.squeeze_weights import reshaped


@dataclass(frozen=True)
class Part:
    """`begin` to `end` of the first axis or, where the axis is not `kept`, the entry at `begin`."""

    begin: int
    end: int
    kept: bool

    def __str__(self) -> str:
        return f"{self.begin}:{self.end}" if self.kept else str(self.begin)

    def shape(self, whole: Sequence[int]) -> ir.Shape:
        return ir.Shape((self.end - self.begin, *whole[1:]) if self.kept else whole[1:])


def split_stacks(graph: ir.Graph) -> None:
    """Splits every constant of which each use is a Gather, Slice or Split of its first axis by constant numbers."""
    for stack, tensor in list(_stacks(graph)):
        uses = [(node, _picked(node, index, tensor.shape.numpy())) for node, index in stack.uses()]
        if stack.is_graph_output() or not uses or any(parts is None for _, parts in uses):
            continue
        values: dict[Part, ir.Value] = {}
        for node, parts in uses:
            for output, part in zip(node.outputs, parts or [], strict=True):
                if part not in values:
                    values[part] = _value(stack, tensor, part)
                    register(graph, values[part])
                ir.convenience.replace_all_uses_with(output, values[part])


def _stacks(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Constants, and what Reshapes make of them (DBRX keeps the rows of all experts)."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if len(tensor.shape) >= 1:
            yield value, tensor
        for node, index in value.uses():
            shape = node.outputs[0].shape
            if is_op(node, "Reshape") and index == 0 and shape is not None and shape.is_static() and len(shape) >= 2:
                yield node.outputs[0], reshaped(tensor, ir.Shape(shape.numpy()))


def _picked(node: ir.Node, index: int, shape: Sequence[int]) -> list[Part] | None:
    """The part of its input `index`, a constant of `shape`, that each output of `node` takes; None where unknown."""
    if index != 0 or any(output.is_graph_output() for output in node.outputs):
        return None
    if is_op(node, "Gather"):
        return _gathered(node, shape)
    if is_op(node, "Slice"):
        return _sliced(node, shape[0])
    return _split(node, shape[0]) if is_op(node, "Split") else None


def _gathered(node: ir.Node, shape: Sequence[int]) -> list[Part] | None:
    number = operand(node, 1)
    numbers = constant_integers(number)
    if len(shape) < 2 or node.attributes.get_int("axis", 0) != 0:
        return None
    if numbers is None or number.shape is None or len(number.shape) != 0 or not -shape[0] <= numbers[0] < shape[0]:
        return None
    begin = numbers[0] % shape[0]
    return [Part(begin, begin + 1, kept=False)]


def _sliced(node: ir.Node, count: int) -> list[Part] | None:
    starts, ends, axes, steps = (
        constant_integers(node.inputs[i]) if i < len(node.inputs) and node.inputs[i] is not None else default
        for i, default in ((1, None), (2, None), (3, [0]), (4, [1]))
    )
    if starts is None or ends is None or len(starts) != 1 or axes != [0] or steps != [1]:
        return None
    begin, end = (min(max(at + count if at < 0 else at, 0), count) for at in (starts[0], ends[0]))
    return [Part(begin, end, kept=True)] if begin < end else None


def _split(node: ir.Node, count: int) -> list[Part] | None:
    if node.attributes.get_int("axis", 0) != 0:
        return None
    parts = len(node.outputs)
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = constant_integers(node.inputs[1])
    else:
        most = -(-count // parts)
        sizes = [min(most, count - i * most) for i in range(parts)]
    if sizes is None or len(sizes) != parts or min(sizes) < 1 or sum(sizes) != count:
        return None
    return [Part(sum(sizes[:i]), sum(sizes[: i + 1]), kept=True) for i in range(parts)]


def _value(stack: ir.Value, tensor: ir.TensorProtocol, part: Part) -> ir.Value:
    """A part; none of its values is copied."""
    shape = part.shape(tensor.shape.numpy())
    name = f"{stack.name}[{part}]"
    value = ir.val(name)
    value.dtype, value.shape = tensor.dtype, shape
    if isinstance(tensor, ir.ExternalTensor):
        size = tensor.nbytes // int(tensor.shape.numpy()[0])
        value.const_value = ir.ExternalTensor(
            tensor.location,
            (tensor.offset or 0) + part.begin * size,
            (part.end - part.begin) * size,
            tensor.dtype,
            shape=shape,
            name=name,
            base_dir=tensor.base_dir,
        )
    elif isinstance(tensor, ComputedTensor):
        value.const_value = tensor.picked(name, part.begin, part.end, part.kept)
    else:
        array = tensor.numpy()
        rows = array[part.begin : part.end] if part.kept else array[part.begin]
        value.const_value = ir.Tensor(rows, dtype=tensor.dtype, shape=shape)
    return value
