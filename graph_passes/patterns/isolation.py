"""Whether nodes can be taken out of the graph: nothing else may see what they compute or the weights they own."""

from collections.abc import Iterable, Set
from typing import TypeVar

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp

Part = TypeVar("Part", Mlp, Linear)


def escaping_use(values: Iterable[ir.Value], inside: Set[ir.Node]) -> str | None:
    """A sentence about the first of `values` that is a graph output or read by a node not `inside`, or None."""
    for value in values:
        if value.is_graph_output():
            return f"its tensor '{value.name}' is also an output of the graph"
        for use in value.uses():
            if use.node not in inside:
                return f"its tensor '{value.name}' is also read by node '{use.node.name}' ({use.node.op_type})"
    return None


def not_isolated(part: Mlp | Linear) -> str | None:
    """Why the nodes of `part` cannot be replaced as a whole, whatever reads its weights, or None if they can."""
    inside = set(part.nodes)
    interior = [value for node in inside for value in node.outputs if value is not part.y]
    interior.sort(key=lambda value: value.name or "")
    reason = escaping_use(interior, inside)
    return None if reason is None else f"an intermediate is used elsewhere: {reason}"


def with_shared_weights(parts: Iterable[tuple[Part, str | None]]) -> list[tuple[Part, str | None]]:
    """Parts with the reason why each cannot be replaced: the given one, or a weight that is read elsewhere.

    Those that have all weights in common, as a network that a graph calls several times, may read them together.
    """
    parts = list(parts)
    owners: dict[tuple[object, ...], set[ir.Node]] = {}
    for part, reason in parts:
        if reason is None:
            weight_nodes = [node for linear in part.linears for node in linear.weight_nodes]
            owners.setdefault(_weights(part), set()).update(part.nodes, weight_nodes)
    return [(part, reason or _shared_weight(part, owners[_weights(part)])) for part, reason in parts]


def _is_lookup(node: ir.Node, index: int) -> bool:
    return is_op(node, "Gather") and index == 0 and node.attributes.get_int("axis", 0) == 0


def _weights(part: Mlp | Linear) -> tuple[object, ...]:
    return tuple(linear.weight.identity for linear in part.linears)


def _shared_weight(part: Mlp | Linear, owners: Set[ir.Node]) -> str | None:
    for linear in part.linears:
        for value in linear.weight_values:
            # A head tied to the embedding gets a quantized copy of its own; the embedding, of which a token reads one
            # row, stays as it is.
            lookups = {node for node, index in value.uses() if _is_lookup(node, index)}
            if (reason := escaping_use([value], owners | lookups)) is not None:
                return f"its weight '{linear.weight.stored.name}' is shared: {reason}"
    return None
