"""Whether nodes can be taken out of the graph: nothing else may see what they compute or the weights they own."""

from __future__ import annotations

from collections.abc import Iterable, Set

import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraph import Linear


def escaping_use(values: Iterable[ir.Value], inside: Set[ir.Node]) -> str | None:
    """A sentence about the first of `values` that is a graph output or read by a node not `inside`, or None."""
    for value in values:
        if value.is_graph_output():
            return f"its tensor '{value.name}' is also an output of the graph"
        for use in value.uses():
            if use.node not in inside:
                return f"its tensor '{value.name}' is also read by node '{use.node.name}' ({use.node.op_type})"
    return None


def isolation_refusal(nodes: Iterable[ir.Node], output: ir.Value, linears: Iterable[Linear]) -> str | None:
    """Why `nodes`, which compute `output` with `linears`, cannot be replaced as a whole, or None if they can."""
    inside = set(nodes)
    interior = [value for node in inside for value in node.outputs if value is not output]
    interior.sort(key=lambda value: value.name or "")
    reason = escaping_use(interior, inside)
    if reason is not None:
        return f"an intermediate is used elsewhere: {reason}"
    for linear in linears:
        owners = inside | set(linear.weight_nodes)
        computed = [value for node in linear.weight_nodes for value in node.outputs]
        reason = escaping_use([linear.weight.stored, *computed], owners)
        if reason is not None:
            return f"a weight is shared: {reason}"
    return None
