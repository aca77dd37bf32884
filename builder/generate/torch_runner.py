"""A decoder in Torch: on this machine's GPU with plugins through the plugin host, on a CPU with their references.

For GPUs that an engine was not built for, and machines without TensorRT. Decode steps run as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed

from trt_nvfp4.plugins.compile.library import Progress, build_library
from trt_nvfp4.plugins.host import PluginHost

from ..errors import UNAVAILABLE, BuilderError
from ..export.decoder_contract import IDS, LOGITS, NEW_LENGTH, PAST_LENGTH
from ..onnx_file import read
from ..targets import arch_of
from .caches import cache_shapes
from .onnx_runner import checked_decoder
from .torch_graph.graph import Graph
from .torch_graph.plugins import HostedPlugins, Plugins, ReferencePlugins
from .torch_graph.program import Program
from .torch_logits import TorchLogits

_CACHE_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def has_gpu() -> bool:
    """Whether Torch sees an NVIDIA GPU."""
    return torch.cuda.is_available() and torch.version.cuda is not None


class TorchRunner:
    """Caches are allocated once per batch and updated in place. Steps of one token run in a program of their own, and
    as a CUDA graph from the second such step of a batch on."""

    def __init__(self, model: Path, device: str | None = None, progress: Progress | None = None) -> None:
        """`model` is an exported or rewritten ONNX file; `device` "cuda" or "cpu" (default: the GPU, if there is one).

        `progress` sees the plugin library being compiled for this GPU, at most once. Raises BuilderError: model for no
        decoder with caches, or one with operators that Torch does not have here; ToolchainError without a compiler.
        """
        self._device = torch.device(device or ("cuda" if has_gpu() else "cpu"))
        on_gpu = self._device.type == "cuda"
        if on_gpu and not has_gpu():
            raise BuilderError(UNAVAILABLE, "torch sees no NVIDIA GPU here; use --runner onnxruntime")
        where = torch.cuda.get_device_name(self._device) if on_gpu else "CPU"
        self.name = f"{model} (torch, {where})"
        self.decoder = checked_decoder(read(model), model)
        self.longest_step = self.decoder.capacity
        graph = Graph(model, self._device)
        plugins = plugins_of(graph, on_gpu, progress)
        self._prefill, self._decode = (Program(graph, plugins, self.decoder.caches) for _ in range(2))
        self._inputs: dict[str, Tensor] = {}
        self._caches: dict[str, Tensor] = {}
        self._logits: Tensor | None = None
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._single_steps = 0

    def start(self, batch: int) -> None:
        if self._inputs and self._inputs[PAST_LENGTH].shape[0] == batch:
            for cache in self._caches.values():
                cache.zero_()
            return
        self._forget()
        dtype = _CACHE_TYPES[self.decoder.cache_dtype]
        self._caches = {
            name: torch.zeros(
                shape, dtype=torch.int8 if name in self.decoder.fp8_caches else dtype, device=self._device
            )
            for name, shape in cache_shapes(self.decoder, batch).items()
        }
        # What a recorded step reads: one token per sequence.
        sizes = {IDS: (batch, 1), PAST_LENGTH: (batch,), NEW_LENGTH: (batch,)}
        self._inputs = {name: torch.zeros(size, dtype=torch.int64, device=self._device) for name, size in sizes.items()}

    @torch.inference_mode()
    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> TorchLogits:
        given = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in given.items()}
        if ids.shape[1] > 1:
            logits = self._run(self._prefill, {name: tensor.to(self._device) for name, tensor in tensors.items()})
        else:
            for name, tensor in tensors.items():
                self._inputs[name].copy_(tensor)
            logits = self._single_step()
        return TorchLogits(logits, new)

    def close(self) -> None:
        self._forget()
        self._prefill.close()
        self._decode.close()

    def _single_step(self) -> Tensor:
        """Run the decode program, or replay it. Its first run chooses kernels, which cannot be recorded; the second is
        recorded."""
        self._single_steps += 1
        if (
            self._recorded is None
            and self._single_steps == 2
            and self._device.type == "cuda"
            and not self._decode.waits
        ):
            self._recorded = torch.cuda.CUDAGraph()
            # NCCL's own thread asks for events meanwhile.
            mode = "thread_local" if distributed.is_initialized() else "global"
            with torch.cuda.graph(self._recorded, capture_error_mode=mode):
                self._logits = self._run(self._decode, self._inputs)
        if self._recorded is None:
            return self._run(self._decode, self._inputs)
        self._recorded.replay()
        assert self._logits is not None
        return self._logits

    def _run(self, program: Program, inputs: dict[str, Tensor]) -> Tensor:
        outputs = program.run({**inputs, **self._caches})
        for cache, present in zip(
            self._caches.values(), (outputs[name] for name in self.decoder.presents), strict=True
        ):
            # Where an operator has no way of updating in place.
            if present.data_ptr() != cache.data_ptr():
                cache.copy_(present)
        return outputs[LOGITS]

    def _forget(self) -> None:
        if self._recorded is not None:
            torch.cuda.synchronize(self._device)
        self._recorded, self._logits, self._single_steps = None, None, 0
        self._caches, self._inputs = {}, {}


def plugins_of(graph: Graph, on_gpu: bool, progress: Progress | None) -> Callable[[], Plugins]:
    """What makes the operators of plugin nodes; a library is compiled only where the graph has any."""
    if not on_gpu or not graph.plugin_nodes:
        return ReferencePlugins
    library = build_library(arch_of(torch.cuda.get_device_capability(graph.device)), progress=progress)
    return partial(HostedPlugins, PluginHost(library))
