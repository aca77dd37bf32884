"""TensorRT and CUDA in host memory: an engine that ONNX Runtime computes, and graphs that replay what was recorded.

They refuse what the real ones refuse or get wrong: shapes outside the profile, addresses that were not allocated,
caches that are not bound in place, recording the first run.
"""

# Names are those of the CUDA runtime.
# ruff: noqa: N802, N815

import ctypes
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


class FakeRuntime:
    """What `Cuda` calls of `cuda.bindings.runtime`. `memory` is the bytes that there are."""

    cudaError_t = Error
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)

    def __init__(self, memory: int = 1 << 24, records: bool = True) -> None:
        self.memory, self.records = memory, records
        self.blocks: dict[int, Any] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.launches = 0
        self.graphs = 0

    def cudaStreamCreate(self) -> tuple[Any, ...]:
        return Error.cudaSuccess, 7

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        if sum(map(len, self.blocks.values())) + size > self.memory:
            return Error.cudaErrorMemoryAllocation, None
        block = ctypes.create_string_buffer(b"\xff" * size, size)  # NaN, as left by another program
        self.blocks[ctypes.addressof(block)] = block
        return Error.cudaSuccess, ctypes.addressof(block)

    cudaMallocHost = cudaMalloc

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.blocks[address]
        return (Error.cudaSuccess,)

    cudaFreeHost = cudaFree

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert size <= len(self.blocks[address])
        ctypes.memset(address, value, size)
        return (Error.cudaSuccess,)

    def cudaGetDevice(self) -> tuple[Any, ...]:
        return Error.cudaSuccess, 0

    def cudaSetDevice(self, number: int) -> tuple[Any, ...]:
        return (Error.cudaSuccess if number == 0 else Error.cudaErrorInvalidValue,)

    def cudaMemcpy(self, to: int, source: int, size: int, kind: int) -> tuple[Any, ...]:
        block, offset = self.block_at(to)
        assert offset + size <= len(block)
        ctypes.memmove(to, source, size)
        return (Error.cudaSuccess,)

    def block_at(self, address: int) -> tuple[Any, int]:
        """The block that an address lies in, and how far."""
        start = max((start for start in self.blocks if start <= address), default=None)
        assert start is not None
        assert address - start < len(self.blocks[start])
        return self.blocks[start], address - start

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[Any, ...]:
        for address in {1: [to], 2: [source], 3: [to, source]}[kind]:
            block, offset = self.block_at(address)
            assert offset + size <= len(block)
        assert self.recording is None
        ctypes.memmove(to, source, size)
        return (Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return (Error.cudaSuccess,)

    cudaStreamDestroy = cudaStreamSynchronize

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.recording = []
        return (Error.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        recorded, self.recording = self.recording, None
        return (Error.cudaSuccess if self.records else Error.cudaErrorStreamCaptureUnsupported), recorded

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        self.graphs += 1
        return Error.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (Error.cudaSuccess,)

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[Any, ...]:
        self.graphs -= 1
        return (Error.cudaSuccess,)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        self.launches += 1
        for work in graph:
            work()
        return (Error.cudaSuccess,)


TRT = SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT=1, OUTPUT=2))
_NAMES = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.INT64: "INT64"}


class FakeEngine:
    """An ICudaEngine over an ONNX model. `profiles`: (fewest, most) new tokens, `batch` the largest one."""

    def __init__(self, model: Path, runtime: FakeRuntime, profiles: list[tuple[int, int]], batch: int) -> None:
        proto = onnx.load(model)
        self.inputs = {value.name: value.type.tensor_type for value in proto.graph.input}
        self.types = self.inputs | {value.name: value.type.tensor_type for value in proto.graph.output}
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.runtime, self.profiles, self.batch = runtime, profiles, batch
        self.name = "Unnamed Network 0"
        self.num_io_tensors = len(self.types)
        self.num_optimization_profiles = len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.types)[index]

    def get_tensor_mode(self, name: str) -> int:
        return TRT.TensorIOMode.INPUT if name in self.inputs else TRT.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_NAMES[self.types[name].elem_type])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in self.types[name].shape.dim)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        assert name == "input_ids"
        fewest, most = self.profiles[profile]
        return [(1, fewest), (1, most), (self.batch, most)]

    def create_execution_context(self) -> "FakeContext":
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.ran = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        fewest, most = self.engine.profiles[self.profile]
        self.ran = self.ran and self.shapes.get(name) == shape
        self.shapes[name] = shape
        return shape[0] <= self.engine.batch and (name != "input_ids" or fewest <= shape[1] <= most)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.engine.runtime.block_at(address)
        self.addresses[name] = address
        return name in self.engine.types

    def execute_async_v3(self, stream: int) -> bool:
        recording = self.engine.runtime.recording
        if recording is None:
            self.ran = True
            self._run()
            return True
        assert self.ran, "TensorRT cannot record the first run after shapes change"
        recording.append(self._run)
        return True

    def _run(self) -> None:
        feeds = {}
        for name, type_ in self.engine.inputs.items():
            dtype = np.dtype(np.int64 if type_.elem_type == onnx.TensorProto.INT64 else np.float32)
            shape = self.shapes.get(name) or self.engine.get_tensor_shape(name)
            feeds[name] = self._array(name, shape, dtype).copy()
        outputs = [name for name in self.engine.types if name not in self.engine.inputs]
        for name, value in zip(outputs, self.engine.session.run(outputs, feeds), strict=True):
            if name.startswith("present."):
                assert self.addresses[name] == self.addresses[name.replace("present", "past_key_values")]
            self._array(name, value.shape, value.dtype)[...] = value

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        block, offset = self.engine.runtime.block_at(self.addresses[name])
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert offset + size <= len(block)
        return np.frombuffer(block, dtype, int(np.prod(shape)), offset).reshape(shape)
