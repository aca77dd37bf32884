"""What TensorRT built, and whether that is what was planned."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layer:
    """One layer of the built engine: its type, the data types it reads, the ONNX nodes it came from."""

    name: str
    kind: str
    datatypes: frozenset[str]
    nodes: frozenset[str]

    @property
    def is_plugin(self) -> bool:
        return self.kind == "custom_layer" or self.kind.lower().startswith("plugin")


def _onnx_nodes(metadata: str) -> frozenset[str]:
    # Unit separators stand between the entries.
    return frozenset(part.rstrip("\x1e\x1f").removesuffix("]") for part in metadata.split("[ONNX Layer: ")[1:])


def layers_of_log(message: str) -> list[Layer]:
    """Read the builder's verbose message "Layers:" (ProfilingVerbosity.DETAILED), one layer per line."""
    layers = []
    for line in message.splitlines()[1:]:
        found = re.match(
            r"Name: (.*?), LayerType: (\w+), Inputs: (.*), Outputs: (.*?), TacticName: .*Metadata: (.*)", line
        )
        if found:
            name, kind, inputs, _, metadata = found.groups()
            datatypes = frozenset(re.findall(r"Datatype: (\w+)", inputs))
            layers.append(Layer(name, kind, datatypes, _onnx_nodes(metadata)))
    return layers


def layers_of_inspector(text: str) -> list[Layer]:
    """Read the engine inspector's JSON."""
    layers = []
    for entry in json.loads(text).get("Layers", []):
        tensors = [*entry.get("Inputs", []), *entry.get("Constants", [])]
        described = " ".join(str(tensor.get("Datatype") or tensor.get("Format/Datatype", "")) for tensor in tensors)
        datatypes = frozenset(re.findall(r"\w+", described))
        nodes = _onnx_nodes(entry.get("Metadata", "")) | {entry["Name"]}
        layers.append(Layer(entry["Name"], entry["LayerType"], datatypes, nodes))
    return layers


# How TensorRT's layer lists spell the precision a GEMM reads its operands in.
PLUGINS = {"nvfp4": "nvfp4 plugin", "fp8_plugin": "fp8 plugin"}
DATATYPES = {"native_nvfp4": {"FP4E2M1", "FP4"}, "fp8": {"FP8"}, "bf16": {"BFloat16", "BF16"}, "fp16": {"Half", "FP16"}}


def check_layers(layers: list[Layer], planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each planned subgraph.

    `planned`: name, decision (nvfp4 | fp8_plugin | native | native_nvfp4 | fp8 | bf16 | fp16) and `engine_nodes`, the
    ONNX nodes that carry it: plugin nodes for nvfp4 and fp8_plugin, TRT_MoE for native, matrix products otherwise.
    Returns name, realized and problem (None when it is as planned).
    """
    results = []
    for subgraph in planned:
        decision, nodes = subgraph["decision"], subgraph["engine_nodes"]
        problems = []
        if not nodes:
            problems.append("no node carries it")
        for node in nodes:
            mine = [layer for layer in layers if node in layer.nodes]
            if decision in PLUGINS:
                plugins = [layer for layer in mine if layer.is_plugin]
                if len(plugins) != 1:
                    problems.append(f"node {node!r}: {len(plugins)} plugin layers in the engine, expected 1")
            elif decision == "native":
                if not mine:
                    problems.append(f"node {node!r}: TensorRT's MoE layer is not in the engine")
            elif not any(layer.datatypes & DATATYPES[decision] for layer in mine):
                seen = sorted(set().union(*(layer.datatypes for layer in mine))) if mine else "no layer"
                problems.append(f"node {node!r}: expected a layer that reads {decision}, TensorRT built {seen}")
        realized = "missing" if problems else PLUGINS.get(decision, decision)
        results.append({"name": subgraph["name"], "realized": realized, "problem": "; ".join(problems) or None})
    return results
