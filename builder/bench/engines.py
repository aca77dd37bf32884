"""Whole engines on the GPU that they are built for: as CUDA graphs, interleaved, with a profile by layer."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.bench.timing import Device, interleave
from trt_nvfp4.builder.errors import BuildFailedError, UsageError, VerificationError
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.common.metrics import cosine

# nvinfer's DataType -> torch's.
TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
PROFILED_RUNS = 10


class LoadedEngine:
    """An engine with a context and memory for one set of inputs."""

    def __init__(self, path: Path, sample: Mapping[str, np.ndarray], device: Device) -> None:
        """Raises BuilderError: unavailable (see `load_engine`), usage when the engine does not take the sample."""
        self.path, self._device = path, device
        self._engine, self._backend = runtime.load_engine(path)
        self._context = self._engine.create_execution_context()
        self.outputs: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        trt = self._backend.trt
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        if set(inputs) != set(sample):
            raise UsageError(f"{path}: the engine's inputs are {', '.join(inputs)}, the samples' {', '.join(sample)}")
        for name in inputs:
            array = torch.from_numpy(np.ascontiguousarray(sample[name]))
            tensor = array.to(device.name, TYPES[self._engine.get_tensor_dtype(name).name])
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise UsageError(f"{path}: input {name} does not take the shape {tuple(tensor.shape)}; see --shapes")
            self._inputs[name] = tensor
        for name in set(names) - set(inputs):
            shape = tuple(self._context.get_tensor_shape(name))
            dtype = TYPES[self._engine.get_tensor_dtype(name).name]
            self.outputs[name] = torch.empty(shape, dtype=dtype, device=device.name)
        for name, tensor in (*self._inputs.items(), *self.outputs.items()):
            self._context.set_tensor_address(name, tensor.data_ptr())

    def enqueue(self) -> None:
        """One inference on the current stream. Raises BuildFailedError when TensorRT refuses."""
        if not self._context.execute_async_v3(self._device.stream()):
            raise BuildFailedError(f"{self.path}: TensorRT could not run this engine")

    def profile(self) -> list[dict[str, Any]]:
        """Mean microseconds of every layer, without a graph, in the engine's order."""
        totals: dict[str, float] = {}
        trt = self._backend.trt

        class Profiler(trt.IProfiler):  # type: ignore[misc,name-defined]
            def report_layer_time(self, layer_name: str, ms: float) -> None:
                totals[layer_name] = totals.get(layer_name, 0.0) + ms

        self._context.profiler = Profiler()
        for _ in range(PROFILED_RUNS):
            self.enqueue()
        return [{"layer": name, "us": round(ms * 1e3 / PROFILED_RUNS, 3)} for name, ms in totals.items()]


def bench_engines(
    device: Device,
    engines: Mapping[str, Path],
    sample: Mapping[str, np.ndarray],
    rounds: int,
    warm_up: int,
    progress: Callable[[int, int, str], None],
) -> tuple[dict[str, dict[str, float]], dict[str, list[dict[str, Any]]], dict[str, float]]:
    """(percentiles, layers, cosine of the outputs to the last contestant's) of every engine, by contestant.

    Raises BuilderError, also (verification) when an output is not finite.
    """
    loaded = {name: LoadedEngine(path, sample, device) for name, path in engines.items()}
    timings = interleave(
        device,
        {name: engine.enqueue for name, engine in loaded.items()},
        rounds,
        warm_up,
        on_round=lambda done, total: progress(done, total, f"round {done}"),
    )
    outputs = {name: {key: value.float().cpu() for key, value in e.outputs.items()} for name, e in loaded.items()}
    for name, values in outputs.items():
        for key, value in values.items():
            if not torch.isfinite(value).all():
                raise VerificationError(f"{engines[name]}: output {key} holds NaN or Inf")
    reference = outputs[list(engines)[-1]]
    cosines = {
        name: min(cosine(_array(value), _array(reference[key])) for key, value in values.items())
        for name, values in outputs.items()
    }
    layers = {name: engine.profile() for name, engine in loaded.items()}
    return {name: asdict(timing) for name, timing in timings.items()}, layers, cosines


def _array(x: torch.Tensor) -> np.ndarray:
    array: np.ndarray = x.double().cpu().numpy()
    return array
