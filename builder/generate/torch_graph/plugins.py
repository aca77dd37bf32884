"""This project's ops: their plugins on the GPU, driven by the plugin host, or on a CPU their Torch references."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from trt_nvfp4.plugins.host import PluginHost, Session
from trt_nvfp4.plugins.ops import OPS

from .registry import Operator


class Plugins(Protocol):
    """Makes operators of nodes, each for inputs of one set of shapes, and holds what these need."""

    def operator(self, op: str, attributes: Mapping[str, Any]) -> Operator:
        """The operator of one node."""

    def close(self) -> None:
        """Free what the operators hold; none of them is called again."""


class ReferencePlugins:
    """The ops' Torch references, on any device: slow, exact."""

    def operator(self, op: str, attributes: Mapping[str, Any]) -> Operator:
        return Operator(lambda *inputs: OPS[op].reference(*inputs, **attributes))

    def close(self) -> None:
        pass


class HostedPlugins:
    """The plugins of a library. One workspace serves them all, since they run one behind the other on one stream.
    Outputs that are caches are written in place."""

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self._sessions = ExitStack()
        # Those that were too small stay: a recorded graph may write to them.
        self._workspaces: list[Tensor] = []

    def operator(self, op: str, attributes: Mapping[str, Any]) -> Operator:
        inputs = [formal.name for formal in OPS[op].inputs]
        # present -> past, present_key -> past_key
        pasts = {
            index: inputs.index(formal.name.replace("present", "past"))
            for index, formal in enumerate(OPS[op].outputs)
            if formal.name.startswith("present")
        }
        session: Session | None = None

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            nonlocal session
            tensors = [tensor.contiguous() for tensor in given]
            if session is None:
                session = self._sessions.enter_context(self._host.session(op, tensors, attributes))
            sizes = zip(session.output_shapes(tensors), session.output_dtypes, strict=True)
            outputs = [
                tensors[pasts[index]] if index in pasts else tensors[0].new_empty(shape, dtype=dtype)
                for index, (shape, dtype) in enumerate(sizes)
            ]
            session.enqueue(tensors, outputs, self._workspace(session.workspace_size, tensors[0].device))
            return tuple(outputs)

        return Operator(compute, writes=tuple(pasts.values()))

    def close(self) -> None:
        self._sessions.close()
        self._workspaces = []

    def _workspace(self, size: int, device: torch.device) -> Tensor:
        if not self._workspaces or self._workspaces[-1].numel() < size:
            self._workspaces.append(torch.empty(max(size, 1), dtype=torch.uint8, device=device))
        return self._workspaces[-1]
