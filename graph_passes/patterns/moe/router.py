"""Matches routers: linears by whose outputs the model chooses weights, in whichever way it applies these."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.patterns.moe.routing import Choice, match_choice
from trt_nvfp4.graph_passes.patterns.moe.selected_weights import ALIASES, Selections
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.plugins.ops.moe_routing import MAX_EXPERTS

# From a choice back to the router's linear: scores, correction bias, groups, masks.
_MAX_ROUTER_NODES = 48


def match_routers(
    graph: Sequence[ir.Node], linears: Mapping[ir.Value, Linear], selections: Selections
) -> dict[ir.Node, ir.Node]:
    """The multiply of every router among `linears` (by their outputs), and the TopK, ArgMax or ArgMin that follows.

    Linears whose outputs nothing but routers read are parts of those (ZAYA's have four). One may choose from a part of
    its outputs. What more than MAX_EXPERTS are chosen from, or what selects no weights, are words of a vocabulary or
    classes.
    """
    routers: dict[ir.Node, ir.Node] = {}
    for node in graph:
        choice = match_choice(node)
        if choice is None or choice.size > MAX_EXPERTS:
            continue
        logits = logits_of(choice, linears)
        if logits is None or linears[logits].weight.shape[0] < choice.size:
            continue
        if selections.selects_weights(choice, logits):
            routers.setdefault(linears[logits].multiply, node)
    serving = dict(routers)  # nodes that nothing but a choice needs
    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        is_output = any(value.is_graph_output() for value in node.outputs)
        if node not in serving and uses and not is_output and all(use.node in serving for use in uses):
            serving[node] = serving[uses[0].node]
    return {linear.multiply: serving[linear.multiply] for linear in linears.values() if linear.multiply in serving}


def logits_of(choice: Choice, linears: Mapping[ir.Value, Linear]) -> ir.Value | None:
    """The one linear's output that the keys of `choice` are computed from."""
    found: set[ir.Value] = set()
    seen: set[ir.Node] = set()
    pending = [choice.keys]
    while pending:
        value = pending.pop()
        node = value.producer()
        if value in linears:
            found.add(value)
        elif node is not None and node not in seen:
            seen.add(node)
            pending += [v for v in node.inputs if v is not None and get_const_tensor(v) is None]
        if len(seen) > _MAX_ROUTER_NODES or len(found) > 1:
            return None
    return next(iter(found), None)


def scored(choice: Choice, logits: ir.Value) -> ir.Value:
    """The operand of the softmax, sigmoid or softplus in front of `choice`: `logits`, or a value computed from them."""
    read: set[ir.Value] = set()
    seen = {logits}
    pending = [choice.keys]
    while pending:
        value = pending.pop()
        node = value.producer()
        if is_op(node, "Softmax", "Sigmoid", "Softplus") and get_const_tensor(operand(node, 0)) is None:
            read.add(operand(node, 0))  # of a constant, it is a temperature
        elif node is not None and value not in seen:
            pending += [v for v in node.inputs if v is not None and get_const_tensor(v) is None]
        seen.add(value)
    if len(read) != 1:
        return logits
    (made,) = read
    source = made
    while is_op(alias := source.producer(), *ALIASES):
        source = operand(alias, 0)
    return made if source is not logits and made.shape and made.shape[-1] == choice.size else logits
