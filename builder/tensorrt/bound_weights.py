"""Engines built with --strip: the weights of their plugins in GPU memory, once for all engines that have the same.

Needs NumPy and cuda-bindings: bundles carry this module.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..cuda.runtime import Cuda
from ..errors import ModelFaultError
from .weights_file import Tensor, WeightsFile, file_name, named_digest, read_header

# nvinfer's DataType by safetensors' types.
_TYPES = {"INT8": "I8", "FP8": "F8_E4M3", "HALF": "F16", "BF16": "BF16", "FLOAT": "F32", "INT32": "I32", "INT64": "I64"}
_ALIGNMENT = 256
_READERS = 8  # tensors that are read, hashed and copied at a time


class DeviceWeights:
    """The tensors of a file in GPU memory, as long as something refers to this."""

    def __init__(self, file: WeightsFile, cuda: Cuda) -> None:
        """Raises BuilderError: model where the content is not that of the file's digest, build without memory."""
        sizes = [-(-tensor.size // _ALIGNMENT) * _ALIGNMENT for tensor in file.tensors]
        weakref.finalize(self, cuda.close).atexit = False
        base = cuda.device(sum(sizes))
        cuda.wait()  # for it to be zeroed: copies do not wait for the stream
        self.file = file
        places = itertools.accumulate(sizes, initial=base)
        self.addresses = {tensor.name: next(places) for tensor in file.tensors}
        device = cuda.current_device()

        def copied(tensor: Tensor) -> str:
            cuda.use_device(device)  # of this thread
            digest, address = hashlib.sha256(), self.addresses[tensor.name]
            for chunk in file.chunks(tensor):
                cuda.copy_now(address, np.frombuffer(chunk, np.uint8))
                digest.update(chunk)
                address += len(chunk)
            return digest.hexdigest()

        with ThreadPoolExecutor(_READERS) as pool:
            file.check_content(pool.map(copied, file.tensors))


_loaded: weakref.WeakValueDictionary[tuple[str, int], DeviceWeights] = weakref.WeakValueDictionary()


class EngineWithWeights:
    """An ICudaEngine whose contexts have the weights bound, and which shows only its other inputs and outputs."""

    def __init__(self, engine: Any, weights: DeviceWeights, path: Path) -> None:
        """Raises ModelFaultError where the file's tensors are not inputs of the engine."""
        self._engine, self._weights, self._path = engine, weights, path
        names: list[str] = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for tensor in weights.file.tensors:
            found = "missing"
            if tensor.name in names:
                dtype = engine.get_tensor_dtype(tensor.name).name
                found = f"{_TYPES.get(dtype, dtype)} {list(engine.get_tensor_shape(tensor.name))}"
            if found != (expected := f"{tensor.dtype} {list(tensor.shape)}"):
                raise ModelFaultError(
                    f"{path}: its input {tensor.name} is {found}, and {weights.file.path} has {expected}; build the "
                    "engine again"
                )
        self._visible = [name for name in names if name not in weights.addresses]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def num_io_tensors(self) -> int:
        return len(self._visible)

    def get_tensor_name(self, index: int) -> str:
        return self._visible[index]

    def create_execution_context(self) -> Any:
        """A context that reads the weights; None where TensorRT has no memory for one."""
        context = self._engine.create_execution_context()
        if context is None:
            return None
        for name, address in self._weights.addresses.items():
            if not context.set_tensor_address(name, address):
                raise ModelFaultError(f"{self._path}: TensorRT does not take the weights {name}")
        # Without them it would read memory that is free.
        weakref.finalize(context, _dropped, self._weights).atexit = False
        return context


def _dropped(_: DeviceWeights) -> None:
    """Does nothing: its argument is kept until this is called."""


def with_weights(engine: Any, path: Path, cuda: Cuda | None = None) -> Any:
    """`engine`, or, if it was built with --strip, the same with its weights from the file beside `path`, which names it
    by their digest. Raises ModelFaultError: the file is missing, damaged or of another model."""
    digest = named_digest(str(engine.name))
    if digest is None:
        return engine
    file = read_header(path.parent / file_name(digest))
    if file.digest != digest:
        raise ModelFaultError(
            f"{file.path}: holds the weights of another model (digest {file.digest[:16]}...), and {path} was built for "
            f"{digest[:16]}...; copy the file that lay beside the engine, or build the engine again"
        )
    cuda = cuda or Cuda()
    key = digest, cuda.current_device()
    weights = _loaded.get(key)
    if weights is None:
        _loaded[key] = weights = DeviceWeights(file, cuda)
    else:
        cuda.close()
    return EngineWithWeights(engine, weights, path)
