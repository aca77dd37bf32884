"""An ONNX file as a list of nodes that Torch computes, and its constants."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from trt_nvfp4.common.collectives import DOMAIN as RANKS
from trt_nvfp4.common.external_data import follow_links
from trt_nvfp4.plugins.ops import DOMAIN, OPS

from ...errors import BuilderError, ModelFaultError
from ...model.onnx_file import read
from .operators import OPERATORS
from .tensors import torch_tensor

#: Axes of reductions and the like are inputs from here on.
_OLDEST_OPSET = 18
#: Constants of so many elements may be axes, shapes and lengths, and are kept on the CPU too.
_SMALL = 1024


@dataclass(frozen=True)
class Node:
    """One node. `last`: the values that no later node and no output reads."""

    name: str
    op: str
    plugin: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    last: tuple[str, ...]

    def __str__(self) -> str:
        return f"node '{self.name or self.outputs[0]}' ({self.op})"


class Graph:
    """Nodes in the order of the file, and constants on `device`; `small` ones are on the CPU as well."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Raises ModelFaultError for a damaged file, and for nodes that Torch has no function for here."""
        self.path, self.device = path, device
        proto = read(path)
        try:
            folder = follow_links(proto, path.parent)
        except ValueError as error:
            raise ModelFaultError(f"{path}: {error}") from error
        self._check(proto)
        self.inputs = [value.name for value in proto.graph.input]
        self.outputs = [value.name for value in proto.graph.output]
        self.small: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        try:
            self.nodes = self._read_nodes(proto, folder)
            for tensor in proto.graph.initializer:
                value = torch_tensor(tensor, folder)
                if value.numel() <= _SMALL:
                    self.small[tensor.name] = value
                self.constants[tensor.name] = value.to(device)
        except BuilderError as error:
            raise BuilderError(f"{path}: {error}", error.exit_code) from error
        uses = Counter(name for node in self.nodes for name in node.inputs)
        #: Inputs that may be overwritten by the only node that reads them.
        self.read_once = {name for name in self.inputs if uses[name] == 1}

    @property
    def plugin_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.plugin]

    def _check(self, proto: onnx.ModelProto) -> None:
        opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)
        if opset < _OLDEST_OPSET:
            raise ModelFaultError(
                f"{self.path}: torch computes models of opset {_OLDEST_OPSET} or newer here, found {opset}; use "
                "--runner onnxruntime, or convert the model (onnx.version_converter)"
            )
        for node in proto.graph.node:
            if (unsupported := _unsupported(node)) is not None:
                raise ModelFaultError(
                    f"{self.path}: node '{node.name or node.output[0]}': torch has no {unsupported} here; use --runner "
                    "onnxruntime"
                )

    def _read_nodes(self, proto: onnx.ModelProto, folder: Path) -> list[Node]:
        needed = set(self.outputs)
        nodes: list[Node] = []
        for node in reversed(proto.graph.node):
            last = tuple(sorted({name for name in node.input if name and name not in needed}))
            needed.update(last)
            attributes = {entry.name: _attribute(entry, folder) for entry in node.attribute}
            plugin = node.domain == DOMAIN
            names = (tuple(node.input), tuple(node.output))
            nodes.append(Node(node.name, node.op_type, plugin, *names, attributes, last))
        nodes.reverse()
        return nodes


def _unsupported(node: onnx.NodeProto) -> str | None:
    """The unsupported part of a node, in words; None where all is supported."""
    if node.domain == DOMAIN:
        return None if node.op_type in OPS else f"op {DOMAIN}.{node.op_type}"
    known = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx", RANKS) else None
    if known is None:
        return f"operator {'.'.join(filter(None, (node.domain, node.op_type)))}"
    outputs = sum(1 for name in node.output if name)
    unsupported = known.unsupported(len(node.input), outputs, {entry.name for entry in node.attribute})
    return unsupported and f"{node.op_type} with {unsupported}"


def _attribute(entry: onnx.AttributeProto, folder: Path) -> Any:
    value = onnx.helper.get_attribute_value(entry)
    if isinstance(value, onnx.TensorProto):
        return torch_tensor(value, folder)
    return value.decode() if isinstance(value, bytes) else value
