"""Compares the engine that TensorRT built with the plan."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Data types of products that are not float32, in TensorRT's words.
_NARROW = frozenset({"BFloat16", "BF16", "Half", "FP16", "FP8", "FP4", "FP4E2M1", "Int8", "INT8", "Int4", "INT4"})


@dataclass(frozen=True)
class Layer:
    """One layer of the built engine: its type, what it reads, the ONNX nodes it came from.

    `inputs` and `constants` hold a description of each tensor's data type, in TensorRT's words. Where TensorRT lists no
    constants, or lists them among the inputs, `constants` is None.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    nodes: frozenset[str]
    constants: tuple[str, ...] | None = None
    #: The optimization profile that it runs in; TensorRT builds a graph for each.
    profile: int = 0
    #: Names of the tensors that it reads and writes.
    tensors: frozenset[str] = frozenset()

    @property
    def is_plugin(self) -> bool:
        return self.kind == "custom_layer" or self.kind.lower().startswith("plugin")

    @property
    def datatypes(self) -> set[str]:
        return {word for tensor in (*self.inputs, *(self.constants or ())) for word in tensor.split()}

    def multiplies(self, datatypes: set[str]) -> bool:
        """Whether two of the tensors it reads have one of these types and one of the two, the activation, is an input.

        Its place tells nothing: scales, biases and residuals may stand before it. Without a list of constants only
        the activation counts.
        """
        activations = _count(self.inputs, datatypes)
        return activations > 0 and (self.constants is None or activations + _count(self.constants, datatypes) > 1)


def _count(tensors: tuple[str, ...], datatypes: set[str]) -> int:
    return sum(not datatypes.isdisjoint(tensor.split()) for tensor in tensors)


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
            name, kind, read, written, metadata = found.groups()
            inputs, listed, constants = read.partition(", Constants: ")
            listed_types = _logged(constants) if listed else None
            ports = re.findall(r"\bName: ([^,]*)", f"{inputs} {written}")
            tensors = frozenset(re.sub(r" \[profile \d+\]$", "", port) for port in ports)
            layers.append(
                Layer(name, kind, _logged(inputs), _onnx_nodes(metadata), listed_types, _profile(line), tensors)
            )
    return _by_graph(layers)


def _profile(described: str) -> int:
    """TensorRT marks the names of all profiles but the first: `conv [profile 1]`."""
    return max(map(int, re.findall(r" \[profile (\d+)\]", described)), default=0)


def _by_graph(layers: list[Layer]) -> list[Layer]:
    """The layers with their profiles. A layer without a marked name has the profile of its compiled graph, whose number
    its name ends with (`_myl1_8`: number 8 of graph 1): layers that decode weights read only constants, which bear no
    mark."""
    numbers = [re.search(r"_myl(\d+)_(\d+)$", layer.name) for layer in layers]
    if max(Counter(number.groups() for number in numbers if number).values(), default=0) > 1:
        return layers  # each profile counts its graphs from 0
    profiles: dict[str, int] = {}
    for layer, number in zip(layers, numbers, strict=True):
        if number:
            profiles[number[1]] = max(layer.profile, profiles.get(number[1], 0))
    return [
        replace(layer, profile=profiles[number[1]]) if number else layer
        for layer, number in zip(layers, numbers, strict=True)
    ]


def _logged(tensors: str) -> tuple[str, ...]:
    return tuple(re.findall(r"Datatype: ([^,}]*\w)", tensors))


def layers_of_inspector(text: str) -> list[Layer]:
    """Read the engine inspector's JSON."""
    layers = []
    for entry in json.loads(text).get("Layers", []):
        nodes = _onnx_nodes(entry.get("Metadata", "")) | {re.sub(r" \[profile \d+\]", "", entry["Name"])}
        constants = _inspected(entry["Constants"]) if "Constants" in entry else None
        inputs, profile = _inspected(entry.get("Inputs", [])), _profile(json.dumps(entry))
        ports = [*entry.get("Inputs", []), *entry.get("Outputs", [])]
        tensors = frozenset(str(port.get("Name", "")) for port in ports)
        layers.append(Layer(entry["Name"], entry["LayerType"], inputs, nodes, constants, profile, tensors))
    return _by_graph(layers)


def _inspected(tensors: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(str(tensor.get("Datatype") or tensor.get("Format/Datatype", "")) for tensor in tensors)


@dataclass(frozen=True)
class PlannedNodes:
    """The expected layers of a replaced subgraph; one of a manifest's `planned`.

    `decision` names how it is computed and `realized` how a report calls that. `carrier`: it is computed by "plugin"
    layers, TensorRT's "trt_moe", or by the layers of matrix "product"s that read `datatypes`, as TensorRT's layer
    lists spell them. `engine_nodes` are the ONNX nodes that these layers come from (or those that dequantize the
    products' weights), `quantized` the products among them whose operands both have that precision. `caches`: inputs of
    the network that these nodes update in place.
    """

    name: str
    decision: str
    realized: str
    carrier: str
    datatypes: tuple[str, ...]
    engine_nodes: tuple[str, ...]
    quantized: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A planned subgraph as it is in the engine; `problem` is None when it is as planned."""

    name: str
    realized: str
    problem: str | None


def check_layers(layers: list[Layer], planned: Sequence[PlannedNodes], profiles: int = 1) -> list[Outcome]:
    """The outcome of each planned subgraph, in each of the engine's optimization profiles."""
    results = []
    for subgraph in planned:
        problems = [] if subgraph.engine_nodes else ["no node carries it"]
        for profile in range(profiles):
            mine = [layer for layer in layers if layer.profile == profile]
            where = f"profile {profile}: " if profiles > 1 else ""
            problems += [where + problem for problem in _problems(subgraph, mine)]
        realized = "missing" if problems else subgraph.realized
        results.append(Outcome(subgraph.name, realized, "; ".join(problems) or None))
    return results


def float32_products(layers: Sequence[Layer], products: Mapping[str, bool]) -> list[str]:
    """The products, by the network's names, that the engine computes in float32: those that are float32 in the network
    (see `network_checks.products`), and those none of whose layers reads anything narrower. Some layers of a product
    only lay out its input."""
    found = []
    for name, is_float32 in products.items():
        mine = [layer.datatypes for layer in layers if name in layer.nodes]
        if mine and (is_float32 or not any(datatypes & _NARROW for datatypes in mine)):
            found.append(name)
    return found


def copied_caches(
    layers: list[Layer], planned: Sequence[PlannedNodes], caches: Mapping[str, str], profiles: int = 1
) -> Iterator[str]:
    """Messages about caches of plugins that are not updated in place: where a plugin's ports are not the network's, one
    address for input and output does not help."""
    nodes = {node for entry in planned if entry.caches for node in entry.engine_nodes}
    expected = {name for entry in planned for name in entry.caches}
    for profile in range(profiles):
        ports = [layer.tensors for layer in layers if layer.profile == profile and not layer.nodes.isdisjoint(nodes)]
        bound = sum(any({past, caches[past]} <= names for names in ports) for past in expected)
        if bound != len(expected):
            yield (
                f"profile {profile}: {bound} of {len(expected)} caches of plugins are updated in place, and TensorRT "
                "copies the others"
            )


def copied_weights(layers: list[Layer], inputs: Sequence[str], profiles: int = 1) -> Iterator[str]:
    """Messages about stripped weights that no plugin reads as they are: TensorRT would convert or copy them at every
    run."""
    for profile in range(profiles):
        read = {name for layer in layers if layer.profile == profile and layer.is_plugin for name in layer.tensors}
        if missing := [name for name in inputs if name not in read]:
            yield (
                f"profile {profile}: {len(missing)} of {len(inputs)} stripped weights are copied before a plugin reads "
                f"them, {missing[0]!r} among them; build without --strip"
            )


def _problems(subgraph: PlannedNodes, layers: list[Layer]) -> Iterator[str]:
    """Differences from the plan among the layers of one profile."""
    for node in subgraph.engine_nodes:
        mine = [layer for layer in layers if node in layer.nodes]
        if subgraph.carrier == "plugin":
            plugins = [layer for layer in mine if layer.is_plugin]
            if len(plugins) != 1:
                yield f"node {node!r}: {len(plugins)} plugin layers in the engine, expected 1"
        elif subgraph.carrier == "trt_moe":
            if not mine:
                yield f"node {node!r}: TensorRT's MoE layer is not in the engine"
        else:
            types, both = set(subgraph.datatypes), node in subgraph.quantized
            if not any(layer.multiplies(types) if both else layer.datatypes & types for layer in mine):
                expected = f"activations and weights in {subgraph.decision}" if both else subgraph.decision
                seen = sorted(set().union(*(layer.datatypes for layer in mine))) if mine else "no layer"
                yield f"node {node!r}: expected a layer that reads {expected}, TensorRT built {seen}"
