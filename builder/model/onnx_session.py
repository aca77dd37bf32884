"""Sessions of ONNX Runtime on the CPU for ONNX models, original or rewritten."""

from collections.abc import Iterable
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import ModelFaultError, UnavailableError
from trt_nvfp4.builder.model.layer_caches import with_layer_caches
from trt_nvfp4.builder.model.onnx_file import opened
from trt_nvfp4.common.cpu_session import TooOldError, cpu_session
from trt_nvfp4.common.external_data import follow_links
from trt_nvfp4.common.local_functions import add_op_functions
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen


def session(
    model: str | Path | OnnxFile, extra_outputs: Iterable[str] = (), rounding: bool = False
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU in which the named inner tensors are outputs too.

    bfloat16, which ONNX Runtime's CPU kernels lack, is computed in float32 (see `widen`); ops whose function bodies the
    file does not hold (a bundle's) get them. Raises ModelFaultError for a file that ONNX Runtime cannot run.
    """
    file = opened(model)
    path, proto = file.path, file.copied()
    try:
        folder = follow_links(proto, path.parent)
    except ValueError as error:
        raise ModelFaultError(f"{path}: {error}") from error
    return session_of(proto, path, folder, extra_outputs, rounding)


def session_of(
    proto: onnx.ModelProto, source: Path, folder: Path, extra_outputs: Iterable[str] = (), rounding: bool = False
) -> onnxruntime.InferenceSession:
    """The same for a model in memory, which is changed; external data lies in `folder`, `source` is for messages."""
    present = {value.name for value in proto.graph.output}
    proto.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in extra_outputs if name not in present
    )
    add_op_functions(with_layer_caches(proto))
    try:
        return cpu_session(widen(proto, rounding), folder)
    except TooOldError as error:
        raise UnavailableError(f"{source}: {error}") from error
    except Exception as error:  # ONNX Runtime's own error types
        raise ModelFaultError(f"{source}: ONNX Runtime cannot run this model: {error}") from error
