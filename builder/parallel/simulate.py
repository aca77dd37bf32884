"""All ranks of a model in one graph, which ONNX Runtime runs on a CPU: each collective becomes a Sum over them."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import compose, helper

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.layer_caches import with_layer_caches
from trt_nvfp4.common.collectives import is_collective
from trt_nvfp4.common.nested_graphs import bodies

# Bytes of tensors that lie beside the graph.
_LARGE = 1024


def prefix(rank: int) -> str:
    """The prefix of a rank's inputs and outputs in the whole."""
    return f"rank{rank}."


def simulated(paths: Sequence[Path]) -> onnx.ModelProto:
    """The ranks' models as one, inputs and outputs named `prefix(rank) + name`.

    Raises ModelFaultError where their collectives do not correspond.
    """
    models = [
        compose.add_prefix(with_layer_caches(onnx.load(path)), prefix(rank), rename_functions=False)
        for rank, path in enumerate(paths)
    ]
    collectives = [[node for node in model.graph.node if is_collective(node)] for model in models]
    if len({len(found) for found in collectives}) != 1:
        raise ModelFaultError(
            f"{paths[0]}: the ranks have {', '.join(str(len(found)) for found in collectives)} collectives, expected "
            "the same number in each; build all ranks by one command"
        )
    whole = models[0]
    for model in models[1:]:
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(whole.graph, field).extend(getattr(model.graph, field))
        known = {(function.domain, function.name) for function in whole.functions}
        whole.functions.extend(each for each in model.functions if (each.domain, each.name) not in known)
    sums: dict[str, onnx.NodeProto] = {}
    for same in zip(*collectives, strict=True):
        inputs = [node.input[0] for node in same]
        for node in same:
            sums[node.output[0]] = helper.make_node("Sum", inputs, list(node.output), node.name)
    nodes = [sums.get(node.output[0], node) if node.output else node for node in whole.graph.node]
    del whole.graph.node[:]
    whole.graph.node.extend(_ordered(whole, nodes))
    return whole


def save_simulated(paths: Sequence[Path], file: Path) -> None:
    """The same at `file`, weights beside it: those of all ranks may be more than one protobuf holds."""
    onnx.save(simulated(paths), file, save_as_external_data=True, size_threshold=_LARGE, location=f"{file.name}.data")


def _reads(node: onnx.NodeProto) -> list[str]:
    """The inputs of a node and of the nodes in its bodies."""
    inner = [name for body in bodies(node) for each in body.node for name in _reads(each)]
    return [*node.input, *inner]


def _ordered(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Nodes behind what they read: each rank's are in order, but wait for one another at collectives."""
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)} | {""}
    made = {name for node in nodes for name in node.output}
    waiting, ordered = list(nodes), []
    while waiting:
        later = []
        for node in waiting:
            if all(name in known or name not in made for name in _reads(node)):
                ordered.append(node)
                known.update(node.output)
            else:
                later.append(node)
        assert len(later) < len(waiting), "a cycle"
        waiting = later
    return ordered
