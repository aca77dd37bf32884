"""Runs a graph. Values that depend only on shapes and small constants are computed once per set of input shapes, on the
CPU. A second run of the same shapes launches nothing but kernels, which a CUDA graph can record."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import BuilderError, ModelFaultError
from .graph import Graph, Node
from .operators import OPERATORS, Operator
from .plugins import Plugins

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Step:
    node: Node
    operator: Operator


class Program:
    """A graph for inputs of one set of shapes at a time; other shapes start anew."""

    def __init__(self, graph: Graph, plugins: Callable[[], Plugins], donated: Collection[str] = ()) -> None:
        """`plugins` makes the operators of plugin nodes for each set of shapes; inputs that are `donated` may be
        overwritten, such as caches."""
        self._graph, self._make_plugins = graph, plugins
        self._donated = graph.read_once & set(donated)
        self._shapes: list[torch.Size] | None = None
        self._plugins: Plugins | None = None
        self._steps: list[_Step] = []
        # Values that depend only on shapes and constants, on the CPU; those that the GPU reads are there too.
        self._fixed: dict[str, Tensor] = {}
        self._uploaded: dict[str, Tensor] = {}
        #: Whether a node reads numbers that are computed on the GPU, and so waits for it.
        self.waits = False

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The graph's outputs; caches among them are the donated inputs, where their operators write in place.

        Raises ModelFaultError, naming the node that fails.
        """
        shapes = [inputs[name].shape for name in self._graph.inputs]
        if shapes != self._shapes:
            self._start_anew()
        values = dict(inputs)
        # In the first run of these shapes it shows which nodes are fixed.
        self._steps = [step for step in self._steps if not self._compute(step, values)]
        self._shapes = shapes
        return {name: self._on_device(name, values) for name in self._graph.outputs}

    def close(self) -> None:
        """Free what the plugins hold."""
        if self._plugins is not None:
            self._plugins.close()
        self._plugins, self._shapes = None, None

    def _start_anew(self) -> None:
        self.close()
        self._plugins = plugins = self._make_plugins()
        self._fixed, self._uploaded, self.waits = dict(self._graph.small), {}, False
        self._steps = [
            _Step(node, plugins.operator(node.op, node.attributes) if node.plugin else OPERATORS[node.op])
            for node in self._graph.nodes
        ]

    def _compute(self, step: _Step, values: dict[str, Tensor]) -> bool:
        """Compute one node; whether its outputs are fixed."""
        node, operator = step.node, step.operator
        fixed = not node.plugin and all(name in self._fixed for name in node.inputs if name)
        inputs = [self._input(step, index, fixed, values) for index in range(len(node.inputs))]
        try:
            found = operator.compute(*inputs, **({} if node.plugin else node.attributes))
        except (torch.OutOfMemoryError, BuilderError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelFaultError(f"{self._graph.path}: {node} cannot be computed: {error}") from error
        outputs = found if isinstance(found, tuple) else (found,)
        is_fixed = fixed or operator.of_shape
        (self._fixed if is_fixed else values).update(zip(node.outputs, outputs, strict=False))
        for name in node.last:
            values.pop(name, None)
        return is_fixed

    def _input(self, step: _Step, index: int, fixed: bool, values: Mapping[str, Tensor]) -> Tensor | None:
        name = step.node.inputs[index]
        if not name:
            return None
        if fixed or index in step.operator.host:
            return self._on_host(name, values)
        tensor = self._on_device(name, values)
        return tensor.clone() if index in step.operator.writes and name not in self._donated else tensor

    def _on_host(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        if name in self._fixed:
            return self._fixed[name]
        tensor = values.get(name)
        tensor = self._graph.constants[name] if tensor is None else tensor
        self.waits |= tensor.device != _CPU
        return tensor.cpu()

    def _on_device(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        if (tensor := values.get(name)) is not None:
            return tensor.to(self._graph.device)
        if (tensor := self._graph.constants.get(name)) is not None:
            return tensor
        if name not in self._uploaded:
            self._uploaded[name] = self._fixed[name].to(self._graph.device)
        return self._uploaded[name]
