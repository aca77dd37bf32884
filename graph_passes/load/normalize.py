"""Brings a model into the form that the passes expect: a recent opset, shapes inferred, functions inlined."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import onnx
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir

from trt_nvfp4.calibration.samples.samples import dimension
from trt_nvfp4.common.local_functions import add_op_functions, inlined
from trt_nvfp4.common.nested_graphs import bodies, nested
from trt_nvfp4.common.onnx_process import changed_by_onnx
from trt_nvfp4.graph_passes.load.by_hand import drop_functions
from trt_nvfp4.graph_passes.load.conditions import fold_conditions, type_branches
from trt_nvfp4.graph_passes.load.node_checks import check_counts
from trt_nvfp4.graph_passes.load.shape_folding import simplify_shapes
from trt_nvfp4.graph_passes.load.skip_norms import split_skip_norms

# The first opset with FP8 types, which the rewritten model may hold.
OLDEST_OPSET = 19
# The first IR version with them.
OLDEST_IR_VERSION = 10
# ONNX Runtime's GELUs, by the `approximate` of ONNX's own, and the first opset with that. onnxruntime-genai exports
# them, and TensorRT lacks FastGelu.
_GELUS = {"Gelu": "none", "FastGelu": "tanh"}
_GELU_OPSET = 20
# Values of larger tensors play no part in conversion and shape inference.
_SMALL = 4096


def normalize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with functions inlined, ONNX Runtime's GELUs and LayerNorms made ONNX's, at opset 19 or later, and with
    all shapes that ONNX can infer.

    Raises LimitError for a model that ONNX cannot convert, or dies of.
    """
    _name_default_domain(proto)
    _forget_devices(proto)
    _forget_senseless_dimensions(proto)
    _type_outputs_as_inputs(proto)
    drop_functions(proto)
    with _weights_aside(proto) as weights:
        proto = changed_by_onnx(_converted, proto)
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
    proto.ir_version = max(proto.ir_version, OLDEST_IR_VERSION)
    return proto


def _converted(proto: onnx.ModelProto) -> onnx.ModelProto:
    if proto.functions:
        proto = inlined(proto)
        for node in all_nodes(proto.graph.node):
            check_counts(node)
    gelus = any(map(is_gelu_of_onnxruntime, all_nodes(proto.graph.node)))
    oldest = _GELU_OPSET if gelus else OLDEST_OPSET
    if _opset(proto) < oldest:
        proto = onnx.version_converter.convert_version(proto, oldest)
    for node in filter(is_gelu_of_onnxruntime, all_nodes(proto.graph.node)):
        node.attribute.append(onnx.helper.make_attribute("approximate", _GELUS[node.op_type]))
        node.domain, node.op_type = "", "Gelu"
    split_skip_norms(proto.graph)
    add_op_functions(proto)
    # Through a Reshape to another tensor's Shape, too: the converter puts one behind Softmax of opset 12 and older.
    proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    if any(node.op_type == "If" for node in proto.graph.node):
        model = ir.from_proto(proto)
        simplify_shapes(model.graph)
        if fold_conditions(model.graph):  # shapes behind it were those of both branches
            proto = ir.to_proto(model)
            del proto.graph.value_info[:]
            proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        type_branches(proto)
    return proto


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """`model` for shape inference: large initializers are empty, as if they were external, and are not read."""
    copy = model.clone()
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > _SMALL:
            stub = _emptied(value.name or "", tensor.shape.numpy(), tensor.dtype.value)
            value.const_value = ir.serde.deserialize_tensor(stub)
    return ir.to_proto(copy)


def is_gelu_of_onnxruntime(node: onnx.NodeProto) -> bool:
    """Whether ONNX has the same operator: FastGelu may add a bias first."""
    return node.domain == "com.microsoft" and node.op_type in _GELUS and not any(node.input[1:])


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """`nodes` and those in the bodies of control flow."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def _name_default_domain(proto: onnx.ModelProto) -> None:
    """Calls the default domain by its one name: ONNX's own passes do not know "ai.onnx"."""
    for part in (proto, *proto.functions):
        nodes = part.graph.node if isinstance(part, onnx.ModelProto) else part.node
        for named in (*part.opset_import, *all_nodes(nodes)):
            if named.domain == "ai.onnx":
                named.domain = ""


def _forget_devices(proto: onnx.ModelProto) -> None:
    """An engine is for one GPU: how nodes were spread over several is of no use, and may be incomplete."""
    proto.ClearField("configuration")
    for part in (proto.graph, *proto.functions):
        for node in all_nodes(part.node):
            node.ClearField("device_configurations")


def _forget_senseless_dimensions(proto: onnx.ModelProto) -> None:
    """Leaves dimensions unnamed that are declared negative, or by a name that says nothing: ONNX's shape inference ends
    the process at the former, and TensorRT takes dimensions of one name for equal."""
    values = [value for function in proto.functions for value in function.value_info]
    for graph in nested(proto.graph):
        values += [*graph.input, *graph.output, *graph.value_info]
    for value in values:
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dimension(dim) == "":
                dim.ClearField("dim_value")
                dim.ClearField("dim_param")


def _type_outputs_as_inputs(proto: onnx.ModelProto) -> None:
    """An output that is an input has the input's type: in the models of onnx_ir both are one value."""
    for graph in nested(proto.graph):
        inputs = {value.name: value for value in graph.input}
        for value in graph.output:
            if value.name in inputs:
                value.type.CopyFrom(inputs[value.name].type)


def _opset(proto: onnx.ModelProto) -> int:
    return max(int(opset.version) for opset in proto.opset_import if not opset.domain)


@contextmanager
def _weights_aside(proto: onnx.ModelProto) -> Iterator[dict[str, onnx.TensorProto]]:
    """Empties large inline initializers, as if they were external, so that ONNX's C++ passes copy no weights."""
    weights = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() > _SMALL:
            weights[tensor.name] = onnx.TensorProto()
            weights[tensor.name].CopyFrom(tensor)
            tensor.CopyFrom(_emptied(tensor.name, tensor.dims, tensor.data_type))
    yield weights


def _emptied(name: str, dims: Sequence[int], data_type: int) -> onnx.TensorProto:
    """A tensor whose values are elsewhere."""
    stub = onnx.TensorProto(name=name, dims=dims, data_type=data_type, data_location=onnx.TensorProto.EXTERNAL)
    stub.external_data.add(key="location", value="aside")
    return stub
