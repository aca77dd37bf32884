"""Values of a part of a graph, computed by ONNX Runtime: what a part means shows in what it computes."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.convenience import extract, get_const_tensor

from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.ir.nodes import is_op, operand

#: Inputs of a decoder that say where its tokens are, and not which.
LENGTHS = ("past_length", "new_length")


class Part:
    """The nodes that compute `outputs` from `inputs`, from lengths and from shapes of the graph's inputs.

    bfloat16 is computed in float32. Raises ValueError where something else is needed, or ONNX Runtime cannot run it.
    """

    def __init__(self, model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        self._inputs = list(inputs)
        leaves = [value for value in leaves_of(outputs, inputs) if value not in inputs]
        self._shapes = [value for value in leaves if is_op(value.producer(), "Shape")]
        self._lengths = [value for value in leaves if value.is_graph_input() and value.name in LENGTHS]
        sized = [*inputs, *self._lengths, *(operand(node, 0) for value in self._shapes if (node := value.producer()))]
        #: A model of one sequence at a time.
        self._single = any(value.shape is not None and value.shape[:1] == (1,) for value in sized)
        others = [value for value in leaves if value not in self._shapes and value not in self._lengths]
        if others:
            raise ValueError(f"it depends on tensor '{others[0].name}'")
        self._names = [str(value.name) for value in outputs]
        part = extract(model.graph, [*inputs, *self._shapes, *self._lengths], list(outputs))
        proto = in_memory(part, model.ir_version)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(
                widen(proto).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own error types
            raise ValueError(f"ONNX Runtime cannot compute '{self._names[0]}': {error}") from error
        self._types = {entry.name: entry.type for entry in self._session.get_inputs()}

    def run(self, past: Sequence[int], new: int, arrays: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """The outputs for `new` tokens of each sequence behind `past` cached ones; `arrays` are the inputs' values."""
        if self._single and len(past) > 1:
            rows = [self.run([length], new, [array[i : i + 1] for array in arrays]) for i, length in enumerate(past)]
            return [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        lengths = {"past_length": np.array(past, np.int64), "new_length": np.full(len(past), new, np.int64)}
        feeds: dict[str, np.ndarray] = {}
        for value, array in zip(self._inputs, arrays, strict=True):
            feeds[str(value.name)] = array
        feeds |= {str(value.name): lengths[str(value.name)] for value in self._lengths}
        feeds |= {str(value.name): _shape(value, len(past), new) for value in self._shapes}
        given = {
            name: array.astype(np.float16) if self._types[name] == "tensor(float16)" else array
            for name, array in feeds.items()
            if name in self._types
        }
        try:
            found = self._session.run(self._names, given)
        except Exception as error:  # ONNX Runtime's own error types
            raise ValueError(f"ONNX Runtime cannot compute '{self._names[0]}': {error}") from error
        return [array.astype(np.float32) if array.dtype == np.float16 else array for array in found]


def in_memory(part: ir.Graph, ir_version: int) -> onnx.ModelProto:
    """`part`, an extracted graph, as a model with its weights inside: ONNX Runtime finds no file beside bytes."""
    return ir.to_proto(ir.external_data.load_to_model(ir.Model(part, ir_version=ir_version)))


def leaves_of(values: Collection[ir.Value], stop: Collection[ir.Value]) -> list[ir.Value]:
    """The values that `values` are computed from: graph inputs, their shapes and `stop`, without constants."""
    found: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    open_values = list(values)
    while open_values:
        value = open_values.pop()
        if value in seen or get_const_tensor(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if value in stop or node is None or _is_input_shape(node):
            found[value] = None
        else:
            open_values += [operand for operand in node.inputs if operand is not None]
    return list(found)


def depends_on_data(value: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Whether a value depends on more than lengths, shapes of inputs and constants; `known` remembers."""
    for inner in _upwards_first(value, known):
        node = inner.producer()
        if get_const_tensor(inner) is not None or (node is not None and _is_input_shape(node)):
            known[inner] = False
        elif node is None:
            known[inner] = inner.name not in LENGTHS
        else:
            known[inner] = any(known[operand] for operand in node.inputs if operand is not None)
    return known[value]


def _upwards_first(value: ir.Value, known: Mapping[ir.Value, bool]) -> Iterator[ir.Value]:
    """`value` and what it depends on and is not known, operands before results."""
    stack = [(value, False)]
    while stack:
        inner, ready = stack.pop()
        if inner in known:
            continue
        node = inner.producer()
        if ready or node is None or get_const_tensor(inner) is not None or _is_input_shape(node):
            yield inner
            continue
        stack.append((inner, True))
        stack += [(operand, False) for operand in node.inputs if operand is not None]


def _is_input_shape(node: ir.Node) -> bool:
    return is_op(node, "Shape") and operand(node, 0).is_graph_input()


def _shape(value: ir.Value, batch: int, new: int) -> np.ndarray:
    """The result of a Shape node of a graph input for `batch` sequences and `new` tokens."""
    node = value.producer()
    assert node is not None
    tensor = operand(node, 0).shape
    if tensor is None:
        raise ValueError(f"the rank of input '{operand(node, 0).name}' is not known")
    sizes = [dim if isinstance(dim, int) else batch if index == 0 else new for index, dim in enumerate(tensor)]
    return np.array(sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))], np.int64)
