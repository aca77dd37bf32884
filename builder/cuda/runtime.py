"""The few CUDA runtime calls that generation needs, by NVIDIA's Python bindings (package cuda-bindings)."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import BuilderError, BuildFailedError, UnavailableError


class Cuda:
    """A stream and the memory used on it. Failures are BuilderErrors that name the call."""

    def __init__(self, stand_in: Any = None) -> None:
        """`stand_in`: for `cuda.bindings.runtime`, in tests. Raises UnavailableError without that package."""
        runtime = stand_in
        if runtime is None:
            try:
                runtime = importlib.import_module("cuda.bindings.runtime")
            except ImportError as error:
                raise UnavailableError(
                    f"an engine needs CUDA's Python bindings: pip install cuda-bindings ({error})"
                ) from error
        self._runtime = runtime
        self.stream = int(self._call("cudaStreamCreate"))
        self._device: list[int] = []
        self._host: list[int] = []

    def device(self, size: int) -> int:
        """The address of so many bytes of GPU memory, zeroed: of what is masked, NaN times 0 would still be NaN."""
        address = int(self._call("cudaMalloc", size))
        self._device.append(address)
        self.clear(address, size)
        return address

    def clear(self, address: int, size: int) -> None:
        self._call("cudaMemsetAsync", address, 0, size, self.stream)

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array in host memory that the GPU copies from and to without a wait."""
        size = int(np.prod(shape)) * dtype.itemsize
        address = int(self._call("cudaMallocHost", size))
        self._host.append(address)
        memory = memoryview((ctypes.c_char * size).from_address(address))
        return np.frombuffer(memory, dtype).reshape(shape)

    def to_device(self, address: int, source: np.ndarray) -> None:
        self._copy(address, source.ctypes.data, source.nbytes, "cudaMemcpyHostToDevice")

    def to_host(self, destination: np.ndarray, address: int) -> None:
        self._copy(destination.ctypes.data, address, destination.nbytes, "cudaMemcpyDeviceToHost")

    def on_device(self, destination: int, source: int, size: int) -> None:
        self._copy(destination, source, size, "cudaMemcpyDeviceToDevice")

    def copy_now(self, address: int, source: np.ndarray) -> None:
        """Copy to GPU memory, done when this returns; for several threads at a time."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpy", address, source.ctypes.data, source.nbytes, kind)

    def current_device(self) -> int:
        """The number of the GPU that this thread uses."""
        return int(self._call("cudaGetDevice"))

    def use_device(self, number: int) -> None:
        """Let this thread use a GPU: each thread starts with the first."""
        self._call("cudaSetDevice", number)

    def wait(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def begin_capture(self) -> None:
        """Record, and do not run, the work that is enqueued until `end_capture`."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._call("cudaStreamBeginCapture", self.stream, mode)

    def end_capture(self) -> Any:
        """The recorded graph, to be launched. Raises BuilderError where something could not be recorded."""
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self.stream)

    def forget(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def free(self) -> None:
        """All memory; the stream stays."""
        self.wait()
        for address in self._device:
            self._call("cudaFree", address)
        for address in self._host:
            self._call("cudaFreeHost", address)
        self._device, self._host = [], []

    def close(self) -> None:
        self.free()
        self._call("cudaStreamDestroy", self.stream)

    def _copy(self, destination: int, source: int, size: int, kind: str) -> None:
        self._call(
            "cudaMemcpyAsync", destination, source, size, getattr(self._runtime.cudaMemcpyKind, kind), self.stream
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._runtime, name)(*arguments)
        if int(error):
            lack = error == self._runtime.cudaError_t.cudaErrorMemoryAllocation
            advice = "; give fewer prompts at once, or end other programs that use the GPU" if lack else ""
            raise BuildFailedError(f"CUDA: {name} failed with {error.name}{advice}")
        return values[0] if values else None


def recorded(cuda: Cuda, enqueue: Callable[[], bool]) -> Any:
    """The graph of the work that `enqueue` enqueues; None where it cannot be recorded, or `enqueue` returns False."""
    cuda.begin_capture()
    enqueued = enqueue()
    try:
        graph = cuda.end_capture()
    except BuilderError:
        return None
    if enqueued:
        return graph
    cuda.forget(graph)
    return None
