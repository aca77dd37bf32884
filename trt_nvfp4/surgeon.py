"""Plugin nodes put in by hand, with onnx-graphsurgeon: for MLPs that no pattern knows.

    import trt_nvfp4.surgeon as surgeon

    graph = surgeon.to_gs("model.onnx")
    tensors = graph.tensors()
    graph.replace_with_nvfp4_gated_mlp(tensors["x"], tensors["y"], gate=gate, up=up, down=down, activation="gelu")
    surgeon.save(graph, "model.by_hand.onnx")

Importing this module gives `gs.Graph` two methods for every op of the domain `trt_nvfp4`, in snake case:
`graph.nvfp4_gated_mlp(x, ...)` adds a node and returns its output (several: a list), and
`graph.replace_with_nvfp4_gated_mlp(x, y, ...)` puts it in the place of what computes `y`. Inputs and attributes are
given by their names (docs/reference/ops.md). Float weights [out_features, in_features] (arrays, Torch tensors,
gs.Constant) are quantized: `weight` of NVFP4Linear; `gate`, `up` and `down` of MLPs and, stacked, of persistent MLPs
and of experts, each with its bias, such as `gate_bias`. Scales of activations, and the expert that all tokens pass, may
be left out.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from trt_nvfp4 import surgeon_weights
from trt_nvfp4.common.external_data import follow_links
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.nested_graphs import nested
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.onnx_process import changed_by_onnx
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.plugins.ops import DOMAIN, OPS, VERSION, Activation, OpDefinition, OpError

try:
    import onnx_graphsurgeon as gs
except ImportError as error:
    raise ImportError(f"{error}; install it: pip install 'trt-nvfp4[surgeon]'") from error

__all__ = ["from_gs", "save", "to_gs"]

# The attribute of a graph that keeps what gs.Graph has no place for.
_METADATA = "_trt_nvfp4_metadata"
_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class SurgeonError(TrtNvfp4Error, ValueError):
    """The op does not allow a node that was to be added."""

    exit_code = 2


class _ExternalValues(gs.ir.tensor.LazyValues):  # type: ignore[misc]
    """Values that stay in their file until they are used."""

    def __init__(self, tensor: onnx.TensorProto, folder: Path) -> None:
        super().__init__(tensor)
        self.folder = folder

    def load(self) -> np.ndarray:
        return onnx.numpy_helper.to_array(self.tensor, str(self.folder))


def to_gs(model: str | Path | OnnxFile | onnx.ModelProto) -> Any:
    """The model as a gs.Graph, with the types of all tensors that ONNX can infer; weights are read when they are used.

    Raises:
        ValueError: External data lies outside of the model's folder, or is missing.
        SurgeonError: ONNX fails at the model.
        OSError: The file cannot be read.
    """
    folder = Path()
    if not isinstance(model, onnx.ModelProto):
        path = OnnxFile.of(model).path
        model = model.copied() if isinstance(model, OnnxFile) else onnx.load(path, load_external_data=False)
        folder = follow_links(model, path.parent)
        try:
            model = changed_by_onnx(onnx.shape_inference.infer_shapes, model)
        except LimitError as error:
            raise SurgeonError(f"{path}: ONNX cannot infer its types: {error}") from error
    graph = gs.import_onnx(model)
    for constant in _constants(graph):
        if isinstance(constant._values, gs.ir.tensor.LazyValues) and uses_external_data(constant._values.tensor):
            constant._values, constant.data_location = _ExternalValues(constant._values.tensor, folder), None
    setattr(graph, _METADATA, {entry.key: entry.value for entry in model.metadata_props})
    return graph


def from_gs(graph: Any) -> onnx.ModelProto:
    """The graph, without what nothing uses, as a model that ONNX Runtime runs, too: the ops' functions are in it.

    Raises:
        SurgeonError: A node of our domain is not an op, or the model's operator set is too old for the ops.
    """
    model, folders = _exported(graph)
    for tensor in _tensors(model.graph):
        if uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(folders[tensor.name]))
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.ClearField("external_data")
    return model


def save(graph: Any, path: str | Path) -> None:
    """Write the graph as from_gs makes it, and its weights beside it, to PATH.data, a tensor at a time.

    Raises:
        SurgeonError: As from_gs.
        OSError: The file cannot be written.
    """
    proto, folders = _exported(graph)
    model = ir.from_proto(proto)
    for each in (model.graph, *model.graph.subgraphs()):
        for name, value in each.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.base_dir = folders[name]
    write(model, Path(path))


def _exported(graph: Any) -> tuple[onnx.ModelProto, dict[str, Path]]:
    """The model, whose external data lie where they were, and the folders of these by tensor."""
    graph.cleanup().toposort()
    # Those of the ops, whatever other tools made of them.
    graph.functions = [function for function in graph.functions if function.domain != DOMAIN]
    for node in graph.nodes:
        if node.domain == DOMAIN:
            if node.op not in OPS:
                raise SurgeonError(f"node {node.name!r}: {DOMAIN} has no op {node.op}; it has {', '.join(OPS)}")
            _bring_function(graph, OPS[node.op])
    model: onnx.ModelProto = gs.export_onnx(graph)
    onnx.helper.set_model_props(model, vars(graph).get(_METADATA, {}))
    values = {constant.name: constant._values for constant in _constants(graph)}
    return model, {name: each.folder for name, each in values.items() if isinstance(each, _ExternalValues)}


def _constants(graph: Any) -> Iterator[Any]:
    for each in (graph, *graph.subgraphs(recursive=True)):
        yield from (tensor for tensor in each.tensors().values() if isinstance(tensor, gs.Constant))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    return (tensor for each in nested(graph) for tensor in each.initializer)


def method(graph: Any, name: str) -> Callable[..., Any]:
    """The graph's method for `name`: an op, or replace_with_ and an op, such as "replace_with_NVFP4Linear"."""
    start = "replace_with_" if name.startswith("replace_with_") else ""
    found: Callable[..., Any] = getattr(graph, start + _method_name(name.removeprefix(start)))
    return found


def _method_name(op: str) -> str:
    """nvfp4_gated_mlp of NVFP4GatedMLP."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op.replace("MoE", "Moe")).lower()


def _add(
    graph: Any, definition: OpDefinition, x: Any, outputs: Sequence[Any] | None, name: str, given: dict[str, Any]
) -> Any:
    """The node's outputs: the one, or a list of several."""
    name = name or _free_name(graph, definition.name)
    if not isinstance(x, gs.Tensor) or x.dtype is None or np.dtype(x.dtype) not in _TYPES:
        raise SurgeonError(
            f"{definition.name} {name!r}: x must be a tensor of float32, float16 or bfloat16, found {x!r}; infer types "
            "first (onnx.shape_inference), or set x.dtype"
        )
    dtype = np.dtype(x.dtype)
    attributes = {key: given.pop(key) for key in list(given) if key in definition.attributes}
    if isinstance(attributes.get("activation"), str):
        attributes["activation"] = _activation(attributes["activation"])
    formals = [formal.name for formal in definition.inputs]
    operands = {formals[0]: x}
    try:
        made = surgeon_weights.inputs_of(definition, dtype, given, attributes)
    except ValueError as error:
        raise SurgeonError(f"{definition.name} {name!r}: {error}") from error
    operands |= {key: gs.Constant(f"{name}/{key}", value) for key, value in made.items()}
    if unknown := [key for key in given if key not in formals]:
        raise SurgeonError(
            f"{definition.name} {name!r} has no {', '.join(unknown)}; its inputs are {', '.join(formals)}"
        )
    operands |= {
        key: value if isinstance(value, gs.Tensor) else _constant(name, key, value) for key, value in given.items()
    }
    for key, value in surgeon_weights.defaults(definition, _shapes(operands), dtype, attributes).items():
        operands.setdefault(key, gs.Constant(f"{name}/{key}", value))
    if missing := [key for key in formals if key not in operands]:
        raise SurgeonError(
            f"{definition.name} {name!r} lacks {', '.join(missing)}; its inputs are {', '.join(formals)}"
        )
    inputs, shapes = [operands[formal] for formal in formals], _shapes(operands)
    try:
        complete = definition.complete_attributes(**attributes)
        found = definition.output_shapes([shapes.get(formal, (None,)) for formal in formals], **complete)
    except OpError as error:
        raise SurgeonError(f"{name!r}: {error}") from error
    _bring_function(graph, definition)
    cache = next((operands[formal.name].dtype for formal in definition.inputs if formal.type == "C"), None)
    types = {"T": dtype, "C": cache, "tensor(int8)": np.dtype(np.int8), "tensor(float)": np.dtype(np.float32)}
    if outputs is None:
        outputs = [gs.Variable(f"{name}/{formal.name}") for formal in definition.outputs]
    for output, formal, shape in zip(outputs, definition.outputs, found, strict=True):
        if output.dtype is None:  # for the next node by hand, which reads it
            output.dtype, output.shape = types[formal.type], list(shape)
    graph.nodes.append(
        gs.Node(definition.name, name, attrs=complete, inputs=inputs, outputs=list(outputs), domain=DOMAIN)
    )
    return outputs[0] if len(outputs) == 1 else list(outputs)


def _shapes(operands: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The known ones."""
    return {key: tuple(tensor.shape) for key, tensor in operands.items() if tensor.shape is not None}


def _bring_function(graph: Any, definition: OpDefinition) -> None:
    """Put the op's function into the graph, for tools without the plugin."""
    if any((function.domain, function.name) == (DOMAIN, definition.name) for function in graph.functions):
        return
    try:
        proto = definition.function(graph.opset)
    except OpError as error:
        raise SurgeonError(str(error)) from error
    opsets = [onnx.helper.make_opsetid("", graph.opset), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    empty = onnx.helper.make_graph([], "functions", [], [])
    carrier = onnx.helper.make_model(empty, functions=[proto], opset_imports=opsets)
    graph.functions.extend(gs.import_onnx(carrier).functions)


def _constant(name: str, key: str, value: Any) -> Any:
    return gs.Constant(f"{name}/{key}", surgeon_weights.as_torch(value).contiguous().numpy())


def _activation(name: str) -> int:
    try:
        return int(Activation[name.upper()])
    except KeyError:
        known = ", ".join(each.name.lower() for each in Activation)
        raise SurgeonError(f"activation must be one of {known}; found {name!r}") from None


def _free_name(graph: Any, op: str) -> str:
    taken = {node.name for node in graph.nodes}
    return next(name for number in range(len(taken) + 1) if (name := f"{op}_{number}") not in taken)


def _replace(graph: Any, definition: OpDefinition, x: Any, y: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Nothing is changed where the node cannot be made."""
    outputs = list(y) if isinstance(y, (list, tuple)) else [y]
    count = len(graph.nodes)
    try:
        made = _add(graph, definition, x, outputs, name, dict(given))
    except BaseException:
        del graph.nodes[count:]
        raise
    for output in outputs:
        for producer in [node for node in list(output.inputs) if node is not graph.nodes[-1]]:
            producer.outputs = [tensor for tensor in producer.outputs if tensor is not output]
    graph.cleanup().toposort()
    return made


def _register(definition: OpDefinition) -> None:
    name = _method_name(definition.name)

    def add(graph: Any, x: Any, *, name: str = "", **given: Any) -> Any:
        return _add(graph, definition, x, None, name, given)

    def replace_with(graph: Any, x: Any, y: Any, *, name: str = "", **given: Any) -> Any:
        return _replace(graph, definition, x, y, name, given)

    methods: dict[str, Callable[..., Any]] = {name: add, f"replace_with_{name}": replace_with}
    for method, function in methods.items():
        function.__name__, function.__doc__ = method, definition.doc
        gs.Graph.register()(function)


for _definition in OPS.values():
    _register(_definition)
