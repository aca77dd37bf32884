"""The parts in Torch: on this machine's GPU with plugins through the plugin host, on a CPU with their references.

For GPUs that no engine was built for, and machines without TensorRT.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trt_nvfp4.builder.components.devices.onnx_device import checked_models
from trt_nvfp4.builder.components.manifest import Manifest, Port
from trt_nvfp4.builder.generate.torch_graph.graph import Graph
from trt_nvfp4.builder.generate.torch_graph.program import Program
from trt_nvfp4.builder.generate.torch_runner import has_gpu, plugins_of
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_file import read


class TorchDevice:
    """One program for each part; caches are updated in place."""

    def __init__(self, folder: Path, manifest: Manifest, device: str | None = None) -> None:
        """`device`: "cuda" or "cpu" (default: the GPU, if there is one). Raises ModelFaultError for a part that is
        missing, not what the manifest says, or has operators that Torch does not have here; ToolchainError without a
        compiler for the plugins."""
        self._device = torch.device(device or ("cuda" if has_gpu() else "cpu"))
        on_gpu = self._device.type == "cuda"
        self.name = f"{folder} (torch, {torch.cuda.get_device_name(self._device) if on_gpu else 'CPU'})"
        self._programs: dict[str, Program] = {}
        for name, model in checked_models(folder, manifest).items():
            graph = Graph(model, self._device)
            decoder = decoder_of(read(model))
            caches = () if decoder is None else decoder.caches
            self._programs[name] = Program(graph, plugins_of(graph, on_gpu, None), caches)

    def put(self, name: str, array: np.ndarray, port: Port) -> Tensor:
        tensor = torch.from_numpy(np.asarray(array, order="C"))
        return tensor.to(self._device, getattr(torch, port.dtype))

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, port.dtype), device=self._device)

    @torch.inference_mode()
    def run(self, part: str, feeds: Mapping[str, Tensor], in_place: Mapping[str, str]) -> dict[str, Tensor]:
        found = self._programs[part].run(feeds)
        for present, cache in in_place.items():
            # Where an operator has no way of updating in place.
            if found[present].data_ptr() != feeds[cache].data_ptr():
                feeds[cache].copy_(found[present])
            found[present] = feeds[cache]
        return found

    def longest(self, part: str, name: str, axis: int) -> int | None:
        return None

    @torch.inference_mode()
    def copy_row(self, source: Tensor, row: int, target: Tensor, to: int, axis: int) -> None:
        target.select(axis, to).copy_(source.select(axis, row))

    @torch.inference_mode()
    def clear_row(self, tensor: Tensor, row: int, axis: int) -> None:
        tensor.select(axis, row).zero_()

    def get(self, tensor: Tensor) -> np.ndarray:
        array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        return array

    def close(self) -> None:
        for program in self._programs.values():
            program.close()
        self._programs = {}
