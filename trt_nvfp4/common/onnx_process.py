"""ONNX's own passes over graphs that anybody may have made run in a process of its own: some graphs end it."""

import os
from collections.abc import Callable
from typing import Any

import onnx

from trt_nvfp4.common.limited import MEMORY, limited

# Graphs of thousands of nodes take a fraction of one.
_SECONDS = 300.0
# Passes copy a graph and write it out.
_COPIES = 8


def with_onnx(function: Callable[[], Any], size: int) -> Any:
    """The result of `function`, converted to JSON and back, which gives ONNX a graph of `size` bytes.

    Raises LimitError: it raised an error, whose text this has, took too long or too much memory, or died.
    """
    return limited(function, _SECONDS, MEMORY + _COPIES * size)


def changed_by_onnx(change: Callable[[onnx.ModelProto], onnx.ModelProto], proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto`, which should not hold large weights, as `change` returns it. Raises LimitError as `with_onnx`."""
    with open(os.memfd_create("graph"), "r+b") as file:

        def run() -> None:
            file.write(change(proto).SerializeToString())
            file.flush()

        with_onnx(run, proto.ByteSize())
        file.seek(0)
        changed: onnx.ModelProto = onnx.ModelProto.FromString(file.read())
        return changed
