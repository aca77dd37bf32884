"""The parts' engines on their GPU: every tensor has a buffer that stays where it is, and flows by its address.

A part whose shapes and addresses are those of a run before is a CUDA graph from its third run on. Needs TensorRT's (or
TensorRT-RTX's) package, NumPy and cuda-bindings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.manifest import Manifest, Port
from trt_nvfp4.builder.cuda.runtime import Cuda, recorded
from trt_nvfp4.builder.errors import BuildFailedError, ModelFaultError, UsageError
from trt_nvfp4.builder.tensorrt.load import load_engine

# The manifest's types by TensorRT's.
_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class DeviceTensor:
    """Values in GPU memory."""

    address: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Run:
    """The key of a recorded graph: a part in a profile, with shapes and addresses of all its tensors."""

    part: str
    profile: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    addresses: tuple[tuple[str, int], ...]


class TensorRTDevice:
    """Engines by the name of their part."""

    def __init__(self, name: str, engines: Mapping[str, Any], trt: Any, manifest: Manifest, cuda: Cuda) -> None:
        """`engines` are ICudaEngines of the module `trt`. Raises ModelFaultError for one that is not the part that
        the manifest describes."""
        self.name, self._engines, self._trt, self._cuda = name, engines, trt, cuda
        for part in manifest.parts:
            _check(name, part.name, engines[part.name], {**part.inputs, **part.outputs})
        self._contexts: dict[tuple[str, int], Any] = {}
        self._buffers: dict[str, tuple[int, int]] = {}
        self._runs = Counter[_Run]()
        self._graphs: dict[_Run, Any] = {}
        self._last: dict[tuple[str, int], _Run] = {}
        self._staged: dict[str, np.ndarray] = {}

    def put(self, name: str, array: np.ndarray, port: Port) -> DeviceTensor:
        stored = np.asarray(array, _numpy(port.dtype), order="C")
        tensor = DeviceTensor(self._buffer(name, stored.nbytes), stored.shape, port.dtype)
        self._staged[name] = stored  # until it is copied
        self._cuda.to_device(tensor.address, stored)
        return tensor

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> DeviceTensor:
        size = _size(shape, port.dtype)
        tensor = DeviceTensor(self._buffer(name, size), shape, port.dtype)
        self._cuda.clear(tensor.address, size)
        return tensor

    def run(self, part: str, feeds: Mapping[str, DeviceTensor], in_place: Mapping[str, str]) -> dict[str, DeviceTensor]:
        engine = self._engines[part]
        profile = self._profile(part, feeds)
        context = self._context(part, profile)
        for name, tensor in feeds.items():
            if not context.set_input_shape(name, tensor.shape):
                raise BuildFailedError(
                    f"{self.name}: {part}: input {name} does not take the shape {list(tensor.shape)}"
                )
        found = {}
        for name in _tensors(engine):
            if name in feeds:
                context.set_tensor_address(name, feeds[name].address)
                continue
            shape = tuple(context.get_tensor_shape(name))
            dtype = _NAMES[engine.get_tensor_dtype(name).name]
            if name in in_place:
                address = feeds[in_place[name]].address
            else:
                address = self._output(f"{part}.{name}", _size(shape, dtype), feeds)
            context.set_tensor_address(name, address)
            found[name] = DeviceTensor(address, shape, dtype)
        tensors = {**feeds, **found}
        shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
        addresses = tuple((name, tensor.address) for name, tensor in tensors.items())
        self._enqueue(context, _Run(part, profile, shapes, addresses))
        return found

    def longest(self, part: str, name: str, axis: int) -> int | None:
        engine = self._engines[part]
        shapes = (engine.get_tensor_profile_shape(name, i)[2] for i in range(engine.num_optimization_profiles))
        return max(int(most[axis]) for most in shapes)

    def copy_row(self, source: DeviceTensor, row: int, target: DeviceTensor, to: int, axis: int) -> None:
        for (read, size), (written, _) in zip(_blocks(source, row, axis), _blocks(target, to, axis), strict=True):
            self._cuda.on_device(written, read, size)

    def clear_row(self, tensor: DeviceTensor, row: int, axis: int) -> None:
        for address, size in _blocks(tensor, row, axis):
            self._cuda.clear(address, size)

    def get(self, tensor: DeviceTensor) -> np.ndarray:
        array = np.empty(tensor.shape, _numpy(tensor.dtype))
        self._cuda.to_host(array, tensor.address)
        self._cuda.wait()
        return array.astype(np.float32) if tensor.dtype == "bfloat16" else array

    def close(self) -> None:
        for graph in self._graphs.values():
            self._cuda.forget(graph)
        self._graphs, self._contexts, self._buffers, self._staged = {}, {}, {}, {}
        self._cuda.close()

    def _output(self, name: str, size: int, feeds: Mapping[str, DeviceTensor]) -> int:
        """The output's buffer; a second one where the first is this very run's input, as what a loop carries is."""
        address = self._buffer(name, size)
        taken = {tensor.address for tensor in feeds.values()}
        return self._buffer(f"{name}, second", size) if address in taken else address

    def _buffer(self, name: str, size: int) -> int:
        address, held = self._buffers.get(name, (0, -1))
        if held < size:
            # What was recorded may read the old one, which is freed with all others.
            address = self._cuda.device(size)
            self._buffers[name] = (address, size)
        return address

    def _profile(self, part: str, feeds: Mapping[str, DeviceTensor]) -> int:
        """The profile with the fewest values among those that take these shapes."""
        engine = self._engines[part]
        sizes = {}
        for index in range(engine.num_optimization_profiles):
            ranges = {name: engine.get_tensor_profile_shape(name, index) for name in feeds}
            if all(_within(feeds[name].shape, low, high) for name, (low, _, high) in ranges.items()):
                sizes[index] = sum(math.prod(high) for _, _, high in ranges.values())
        if not sizes:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in feeds.items())
            raise UsageError(
                f"{self.name}: no profile of the engine {part} takes {shapes}; build it with --max-shapes that do"
            )
        return min(sizes, key=lambda index: sizes[index])

    def _context(self, part: str, profile: int) -> Any:
        context = self._contexts.get((part, profile))
        if context is None:
            context = self._engines[part].create_execution_context()
            if context is None or not context.set_optimization_profile_async(profile, self._cuda.stream):
                raise BuildFailedError(f"{self.name}: TensorRT has no memory for running {part}")
            self._contexts[part, profile] = context
        return context

    def _enqueue(self, context: Any, run: _Run) -> None:
        """TensorRT allocates and compiles in the first run after shapes change, which cannot be recorded; the next one
        with the same shapes and addresses is recorded."""
        place = run.part, run.profile
        same_shapes = place in self._last and self._last[place].shapes == run.shapes
        self._last[place] = run
        self._runs[run] += 1
        if run not in self._graphs and self._runs[run] > 1 and same_shapes:
            self._graphs[run] = recorded(self._cuda, lambda: bool(context.execute_async_v3(self._cuda.stream)))
        if self._graphs.get(run) is not None:
            self._cuda.launch(self._graphs[run])
        elif not context.execute_async_v3(self._cuda.stream):
            raise BuildFailedError(f"{self.name}: TensorRT could not run {run.part}")


def open_engines(folder: Path, manifest: Manifest, files: Mapping[str, Path]) -> TensorRTDevice:
    """The engines `files`, by part, on this machine's GPU. Raises BuilderError as `load_engine`."""
    loaded = {name: load_engine(file) for name, file in files.items()}
    engines = {name: engine for name, (engine, _) in loaded.items()}
    backend = next(iter(loaded.values()))[1]
    return TensorRTDevice(f"{folder} ({backend.module})", engines, backend.trt, manifest, Cuda())


def _check(where: str, part: str, engine: Any, ports: Mapping[str, Port]) -> None:
    names = _tensors(engine)
    if odd := sorted(names ^ ports.keys()):
        what = "is not in the manifest" if odd[0] in names else "is missing among the engine's tensors"
        raise ModelFaultError(f"{where}: {part}: {odd[0]} {what}; build the parts together")
    for name, port in ports.items():
        dims = ["?" if int(dim) < 0 else int(dim) for dim in engine.get_tensor_shape(name)]
        kind = engine.get_tensor_dtype(name).name
        found = Port(_NAMES.get(kind, kind), dims)
        if not port.takes(found):
            raise ModelFaultError(f"{where}: {part}: {name} is {found}, expected {port}; build the parts together")


def _tensors(engine: Any) -> set[str]:
    return {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}


def _within(shape: tuple[int, ...], low: Any, high: Any) -> bool:
    return all(int(a) <= size <= int(b) for size, a, b in zip(shape, low, high, strict=True))


def _numpy(dtype: str) -> np.dtype[Any]:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes  # a device whose models take and give none need not have it

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def _blocks(tensor: DeviceTensor, row: int, axis: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of every block of memory that a row along `axis` has."""
    size, rows = _size(tensor.shape[axis + 1 :], tensor.dtype), tensor.shape[axis]
    for block in range(math.prod(tensor.shape[:axis])):
        yield tensor.address + (block * rows + row) * size, size


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
