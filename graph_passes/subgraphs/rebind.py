"""The subgraphs of a model as those of its clone, so that a clone need not be searched again."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


def rebind(subgraphs: Sequence[Subgraph], original: ir.Graph, clone: ir.Graph) -> list[Subgraph]:
    """`subgraphs`, found in `original`, of the nodes and values of `clone`, which must be `original.clone()` as it was
    made."""
    twins: dict[object, object] = dict(zip(original.inputs, clone.inputs, strict=True))
    twins.update(zip(original.initializers.values(), clone.initializers.values(), strict=True))
    for node, twin in zip(original, clone, strict=True):
        twins[node] = twin
        twins.update(zip(node.outputs, twin.outputs, strict=True))

    def twin_of(part: Any) -> Any:
        if isinstance(part, (ir.Value, ir.Node)):
            return twins[part]
        if isinstance(part, tuple):
            return tuple(map(twin_of, part))
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{entry.name: twin_of(getattr(part, entry.name)) for entry in fields(part)})
        return part

    return [twin_of(subgraph) for subgraph in subgraphs]
