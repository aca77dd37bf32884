"""A model repository of NVIDIA's Triton Inference Server: an engine and its configuration.

Layout and fields: github.com/triton-inference-server/server, docs/user_guide/model_repository.md and
model_configuration.md; the message is `inference.ModelConfig` of its model_config.proto.
"""

from collections.abc import Iterable, Set
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.common.replacing import link_or_copy, replacing

CONFIG, ENGINE = "config.pbtxt", "1/model.plan"
#: The types that Triton and TensorRT both have, by ONNX's numbers.
_TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.BFLOAT16: "TYPE_BF16",
    onnx.TensorProto.INT8: "TYPE_INT8",
    onnx.TensorProto.UINT8: "TYPE_UINT8",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.BOOL: "TYPE_BOOL",
}
_README = """# A model repository for Triton

Made by trt-nvfp4. Start the server of a release with the engine's own version of TensorRT:

    tritonserver --model-repository={folder}{flags}

{missing}A request states every dimension, the batch too (`max_batch_size: 0`): Triton does not join requests.
"""


def check_name(name: str) -> None:
    """Raise UsageError for a name that a text of the configuration cannot hold."""
    if not name.isprintable() or set(name) & set('"\\/'):
        raise UsageError(f"{name!r}: Triton needs a model name without quotes and slashes; rename the output")


def config(name: str, model: onnx.ModelProto, shape_inputs: Set[str]) -> str:
    """The text of `config.pbtxt`. `shape_inputs`: inputs whose values are a shape. Raises ModelFaultError for a tensor
    of a type that Triton does not have."""
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in weights]
    text = f'name: "{name}"\nplatform: "tensorrt_plan"\nmax_batch_size: 0\n'
    text += "".join(_tensor("input", value, value.name in shape_inputs) for value in given)
    text += "".join(_tensor("output", value, False) for value in model.graph.output)
    return text + "instance_group [ { kind: KIND_GPU } ]\n"


def write(folder: Path, name: str, text: str, engine: Path | None, libraries: Iterable[Path]) -> None:
    """Fill `folder`/`name` with the configuration `text`, the engine (None: a device builds it) and the plugin
    libraries that it does not carry; a README in `folder` says how to start the server with all models there."""
    model = (folder / name).absolute()
    (model / ENGINE).parent.mkdir(parents=True, exist_ok=True)
    (model / CONFIG).write_text(text)
    for library in libraries:
        _place(library, model / library.name)
    plugins = {library.name: str(library) for library in sorted(model.parent.glob("*/*.so"))}.values()
    flags = f" --backend-config=tensorrt,plugins={';'.join(plugins)}" if plugins else ""
    missing = ""
    if engine is None:
        missing = f"On the device, `python3 build_engine.py -o {model / ENGINE}` in the bundle adds the engine.\n\n"
    else:
        _place(engine, model / ENGINE)
    (folder / "README.md").write_text(_README.format(folder=folder.absolute(), flags=flags, missing=missing))


def _place(file: Path, destination: Path) -> None:
    with replacing(destination) as temporary:
        link_or_copy(file, temporary)


def _tensor(kind: str, value: onnx.ValueInfoProto, holds_shape: bool) -> str:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TYPES:
        found = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        raise ModelFaultError(
            f"{kind} {value.name!r} is {found}, a type that Triton does not have; leave --set triton out"
        )
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    marked = "\n  is_shape_tensor: true" if holds_shape else ""
    if not dims:  # a scalar, which Triton cannot name
        dims, marked = [1], f"{marked}\n  reshape: {{ shape: [] }}"
    escaped = value.name.replace("\\", "\\\\").replace('"', '\\"')
    return f'{kind} [ {{\n  name: "{escaped}"\n  data_type: {_TYPES[tensor.elem_type]}\n  dims: {dims}{marked}\n}} ]\n'
