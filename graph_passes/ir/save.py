"""Writes a model and its external data: all or nothing, one tensor in memory at a time."""

import os
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor

# Called with (bytes written, bytes in all, what is being written).
Progress = Callable[[int, int, str], None]
# Smaller tensors (shapes, scalars, axes) stay in the model file, where shape inference sees them.
_INLINE_BYTES = 4096


def write(model: ir.Model, path: Path, progress: Progress | None = None) -> None:
    """Writes `path` and `<path>.data`; both appear when both are complete, or in between only the data.

    Raises:
        OSError: the destination cannot be written, or the disk is full; it names the destination.
    """
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = [tensor for tensor in tensors if tensor.nbytes > _INLINE_BYTES]
    total, done, name = sum(tensor.nbytes for tensor in external), 0, path.name

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total, name)

    def begin(tensor: ir.TensorProtocol, _: ir.external_data.CallbackInfo) -> None:
        nonlocal name
        name = tensor.name or ""
        if isinstance(tensor, StreamedTensor):
            tensor.on_write = advance
        else:
            advance(tensor.nbytes)

    folder = path.parent
    try:
        with scratch(path.parent) as folder:
            temporary = folder / path.name
            data = temporary.with_name(f"{path.name}.data")
            ir.save(model, temporary, external_data=data.name, size_threshold_bytes=_INLINE_BYTES, callback=begin)
            move(temporary, path)
    except OSError as error:
        # Writes name no file, or one in the folder that is gone by now.
        if error.filename is None or str(folder) in str(error.filename):
            error.filename = str(path)
        raise


def move(made: Path, path: Path) -> None:
    """Moves a model that `write` made to `path`, of the same name, and its external data. Raises OSError."""
    data = made.with_name(f"{made.name}.data")
    # The data first, and no earlier model beside it: with another's weights it would pass for whole.
    if data.exists():
        path.unlink(missing_ok=True)
        os.replace(data, path.with_name(data.name))
    os.replace(made, path)
