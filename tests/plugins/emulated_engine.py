"""Rewritten models as engines would run them, on the CPU: every plugin node by a compiled library on the emulator.

As in TensorRT each node has one plugin per profile, made for the profile's largest shapes, and all share a workspace
that nothing clears. Torch runs the other nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from split_host import SplitHost
from torch import Tensor

from trt_nvfp4.builder.components.devices import torch_device
from trt_nvfp4.builder.generate import torch_runner
from trt_nvfp4.builder.generate.torch_graph.plugins import ReferencePlugins
from trt_nvfp4.builder.generate.torch_graph.registry import Operator
from trt_nvfp4.builder.generate.torch_runner import TorchRunner
from trt_nvfp4.plugins.host import Session
from trt_nvfp4.plugins.ops import OPS

#: Changes what a node's enqueue is given: (op, inputs) -> inputs; None leaves the enqueue out.
Fault = Callable[[str, Sequence[Tensor]], Sequence[Tensor] | None]
Shapes = list[list[torch.Size]]


class _Recorded(ReferencePlugins):
    """The references, which note the shapes of every node's inputs."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def operator(self, op: str, attributes: Mapping[str, Any]) -> Operator:
        compute = super().operator(op, attributes).compute

        def noted(*inputs: Tensor) -> Any:
            self._shapes.append([x.shape for x in inputs])
            return compute(*inputs)

        return Operator(noted)


class _Profile:
    """The plugins of one profile, node by node in the order of the graph; by default `largest` are those that come."""

    def __init__(self, host: SplitHost, largest: Shapes | None, faults: Sequence[Fault]) -> None:
        self._host, self._largest, self._faults = host, largest, faults
        self._sessions: dict[int, Session] = {}
        self.workspace = torch.full((0,), 0xA5, dtype=torch.uint8)
        self.enqueued = 0

    def run(self, node: int, op: str, attributes: Mapping[str, Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if node not in self._sessions:
            shapes = [x.shape for x in inputs] if self._largest is None else self._largest[node]
            largest = [x.new_empty(shape, device="meta") for x, shape in zip(inputs, shapes, strict=True)]
            self._sessions[node] = self._host.session(op, inputs, attributes, max_inputs=largest)
        session = self._sessions[node]
        if self.workspace.numel() < session.workspace_size:
            self.workspace = torch.full((session.workspace_size,), 0xA5, dtype=torch.uint8)
        outputs = []
        shapes = session.output_shapes(inputs)
        names = [formal.name for formal in OPS[op].inputs]
        for formal, shape, dtype in zip(OPS[op].outputs, shapes, session.output_dtypes, strict=True):
            past = formal.name.replace("present", "past")
            outputs.append(inputs[names.index(past)] if past in names else torch.full(shape, float("nan"), dtype=dtype))
        given: Sequence[Tensor] | None = inputs
        for fault in self._faults:
            given = fault(op, inputs)
        if given is not None:
            session.enqueue(given, outputs, self.workspace)
            self.enqueued += 1
        return tuple(outputs)


class _EnginePlugins(ReferencePlugins):
    def __init__(self, profile_of: Callable[[Sequence[Tensor], int], _Profile]) -> None:
        self._profile_of, self._nodes = profile_of, 0

    def operator(self, op: str, attributes: Mapping[str, Any]) -> Operator:
        node, self._nodes = self._nodes, self._nodes + 1
        names = [formal.name for formal in OPS[op].inputs]
        pasts = [
            names.index(x.name.replace("present", "past")) for x in OPS[op].outputs if x.name.startswith("present")
        ]

        def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
            tensors = [x.contiguous() for x in inputs]
            return self._profile_of(tensors, node).run(node, op, attributes, tensors)

        return Operator(compute, writes=tuple(pasts))


def emulated_parts(host: SplitHost, monkeypatch: Any, faults: Sequence[Fault] = ()) -> list[_Profile]:
    """Let every later TorchDevice run its parts' plugins on `host`; returns a list that gets a profile for each set of
    shapes that a part with plugins runs."""
    made: list[_Profile] = []

    def profile(graph: Any) -> ReferencePlugins:
        profile = _Profile(host, None, faults)
        if graph.plugin_nodes:
            made.append(profile)
        return _EnginePlugins(lambda inputs, node: profile)

    monkeypatch.setattr(torch_device, "plugins_of", lambda graph, on_gpu, progress: partial(profile, graph))
    return made


class EmulatedEngine(TorchRunner):
    """A runner of `model` with two profiles, as build-engine makes them: prompts of up to `longest` tokens, and decode
    steps of up to `decode`, of `batch` sequences at most."""

    def __init__(
        self,
        model: Path,
        host: SplitHost,
        monkeypatch: Any,
        batch: int,
        longest: int,
        decode: int,
        faults: Sequence[Fault],
    ) -> None:
        def plugins_as(made: Callable[[], Any]) -> None:
            monkeypatch.setattr(torch_runner, "plugins_of", lambda graph, on_gpu, progress: made)

        largest: dict[bool, Shapes] = {}
        for is_decode, tokens in ((False, longest), (True, decode)):
            shapes = largest[is_decode] = []
            plugins_as(lambda shapes=shapes: _Recorded(shapes))
            runner = TorchRunner(model, "cpu")
            runner.start(batch)
            ones = np.ones(batch, np.int64)
            runner.step(np.ones((batch, tokens), np.int64), 0 * ones, tokens * ones)
        self.profiles = {key: _Profile(host, shapes, faults) for key, shapes in largest.items()}
        self._decode, self._is_decode = decode, False
        plugins_as(lambda: _EnginePlugins(lambda inputs, node: self.profiles[self._is_decode]))
        super().__init__(model, "cpu")

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Any:
        self._is_decode = ids.shape[1] <= self._decode
        return super().step(ids, past, new, count)
