"""Takes the weights of plugins out of the model that TensorRT reads: they become inputs, and a file of their own."""

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo, set_external_data, uses_external_data

from trt_nvfp4.builder.model.onnx_file import WITHOUT_WEIGHTS
from trt_nvfp4.builder.tensorrt.weights_file import CHUNK, Tensor, WeightsFile, read_chunks, write
from trt_nvfp4.common.external_data import external_files, tensors
from trt_nvfp4.common.nested_graphs import within
from trt_nvfp4.plugins.ops import DOMAIN

#: Smaller constants, such as scales of whole tensors, stay in the engine.
SMALLEST = 1024
_ALIGNMENT = 64
_TYPES: dict[int, str] = {
    onnx.TensorProto.INT8: "I8",
    onnx.TensorProto.FLOAT8E4M3FN: "F8_E4M3",
    onnx.TensorProto.FLOAT16: "F16",
    onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.FLOAT: "F32",
    onnx.TensorProto.INT32: "I32",
    onnx.TensorProto.INT64: "I64",
}


def strip(model: Path, whole: Path, network: Path) -> WeightsFile | None:
    """Write what an engine without the plugins' weights is built from, beside each other; None, and nothing, where
    `model` has no plugin with weights.

    A file of weights; `whole`, the model with its weights there and in a file of external data; `network`, in which the
    weights of plugins are inputs. Weights are copied in pieces, tensor by tensor. Without function bodies, like every
    model that TensorRT reads.
    """
    proto = onnx.load(model, load_external_data=False)
    del proto.functions[:]
    files = external_files(proto, model.parent)
    names = _of_plugins(proto)
    by_name = {tensor.name: tensor for tensor in proto.graph.initializer}
    weights = [
        described
        for tensor in proto.graph.initializer
        if tensor.name in names and tensor.data_type in _TYPES and (described := _described(tensor)).size >= SMALLEST
    ]
    if not weights:
        return None
    written = write(whole.parent, weights, lambda tensor: _bytes(by_name[tensor.name], files))
    moved = {tensor.name: tensor for tensor in written.tensors}
    types = {name: by_name[name].data_type for name in moved}
    with whole.with_name(whole.name + ".data").open("wb") as data:
        for tensor in tensors(proto):
            if tensor.name in moved and tensor is by_name[tensor.name]:
                _place(tensor, written.path.name, moved[tensor.name].begin, moved[tensor.name].size)
            elif uses_external_data(tensor):
                data.write(b"\0" * (-data.tell() % _ALIGNMENT))
                begin = data.tell()
                data.writelines(_bytes(tensor, files))
                _place(tensor, whole.name + ".data", begin, data.tell() - begin)
    onnx.save(proto, whole)
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in moved]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    given = {value.name for value in proto.graph.input}
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, types[name], tensor.shape)
        for name, tensor in moved.items()
        if name not in given
    )
    proto.metadata_props.add(key=WITHOUT_WEIGHTS, value=whole.name)
    onnx.save(proto, network)
    return written


def _place(tensor: onnx.TensorProto, file: str, begin: int, size: int) -> None:
    """Note where a tensor's bytes lie, in place of those in the model."""
    for field in ("raw_data", "int32_data", "int64_data", "float_data"):
        tensor.ClearField(field)
    tensor.raw_data = b""  # `set_external_data` asks for the field
    set_external_data(tensor, file, begin, size)
    tensor.ClearField("raw_data")


def _of_plugins(proto: onnx.ModelProto) -> set[str]:
    """Names that plugins of the graph read, and nothing else does."""
    plugins = {name for node in proto.graph.node if node.domain == DOMAIN for name in node.input}
    others = {name for node in proto.graph.node if node.domain != DOMAIN for name in node.input}
    others |= {name for node in proto.graph.node for body in within(node) for each in body.node for name in each.input}
    others |= {value.name for value in proto.graph.output}
    return plugins - others


def _described(tensor: onnx.TensorProto) -> Tensor:
    return Tensor(tensor.name, _TYPES[tensor.data_type], tuple(tensor.dims))


def _bytes(tensor: onnx.TensorProto, files: dict[str, Path]) -> Iterator[bytes]:
    """A tensor's bytes, from the model or its external data, piece by piece."""
    if not uses_external_data(tensor):
        data = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
        yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
        return
    info = ExternalDataInfo(tensor)
    size = math.ceil(math.prod(tensor.dims) * ir.DataType(tensor.data_type).itemsize)
    with files[info.location].open("rb") as file:
        yield from read_chunks(file, info.offset or 0, size, str(files[info.location]))
