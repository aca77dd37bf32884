"""Tells whether a choice selects weights, as a router's does, or only values: classes, action bins, tokens to keep."""

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.patterns.moe.routing import Choice

# The same numbers, in another type or shape.
ALIASES = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")
_GATHERS = ("Gather", "GatherND", "GatherElements")
# What takes rows, by inputs from the second on.
_TAKES_ROWS = (*_GATHERS, "Slice", "Compress")
# What multiplies or replaces values by a mask, or puts rows where indices say.
_MASKS = (*_PRODUCTS, "Mul", "Where", "ScatterElements", "ScatterND")
# Nodes between where a choice takes effect and the weights that it selects: activation, bias, norm.
_MAX_NODES = 48


class Selections:
    """Where choices select weights in a graph; `linears` are the outputs of its linears.

    A choice meets other values at gates: nodes that read it, or values that are computed from only it and the
    router's output, together with something else. Where these take matrices from a constant, or where different indices
    go together with different products, the choice selects weights.
    """

    def __init__(self, graph: ir.Graph, linears: Collection[ir.Value]) -> None:
        self._graph = graph
        # By value other than a constant: the one product or input that it is computed of, None where there are several.
        # Values that only shapes and constants make have no entry.
        self._origins: dict[ir.Value, ir.Value | None] = {value: value for value in graph.inputs}
        for node in graph:
            starts_anew = is_op(node, *_PRODUCTS) or any(_bodies(node))
            origins = {self._origins[value] for value in node.inputs if value in self._origins}
            if is_op(node, "Shape", "Size") or not (origins or starts_anew):
                continue
            for value in node.outputs:
                if starts_anew or value in linears:
                    self._origins[value] = value
                else:
                    self._origins[value] = origins.pop() if len(origins) == 1 else None
                    origins.add(self._origins[value])

    def selects_weights(self, choice: Choice, logits: ir.Value) -> bool:
        """Whether `choice`, made by `logits`, selects weights."""
        branches: dict[ir.Value, set[frozenset[ir.Node]]] = {}
        seen: set[ir.Value] = set()
        pending = [(value, False) for value in choice.node.outputs]
        while pending:
            selector, picked = pending.pop()
            if selector in seen:
                continue
            seen.add(selector)
            for node, index in selector.uses():
                if node.graph is not self._graph:
                    if any(is_op(inner, *_PRODUCTS) for inner in node.graph or ()):
                        return True
                elif any(is_op(inner, *_PRODUCTS) for body in _bodies(node) for inner in body.all_nodes()):
                    return True
                elif self._is_made_of(node, logits):
                    matrices = index > 0 and is_op(node, *_GATHERS) and _dimensions(operand(node, 0)) >= 3
                    pending += [(value, picked or matrices) for value in node.outputs]
                elif picked and is_op(node, "Mul", *_PRODUCTS):
                    return True
                elif products := frozenset(self._products(node, index, selector, logits)):
                    if any(_multiplies_stack(product, choice.size) for product in products):
                        return True
                    branches.setdefault(_unaliased(selector), set()).add(products)
                elif not is_op(node, *_PRODUCTS):  # such as a mask that leaves padding out, too
                    pending += [(value, picked) for value in node.outputs]
        return len(branches) > 1 and len(set.union(*branches.values())) > 1

    def _is_made_of(self, node: ir.Node, logits: ir.Value) -> bool:
        """Whether the outputs of `node` depend on nothing but `logits`."""
        return not is_op(node, *_PRODUCTS) and all(self._origins.get(v, logits) is logits for v in node.inputs if v)

    def _products(self, gate: ir.Node, index: int, selector: ir.Value, logits: ir.Value) -> Iterator[ir.Node]:
        """The products behind a `gate` that takes rows by its input `index`, the selector, or those in front of what it
        masks."""
        pending: list[ir.Value | None]
        if not is_op(gate, *_MASKS, *_TAKES_ROWS):
            return
        forward = index > 0 and is_op(gate, *_TAKES_ROWS)
        others = [v for v in gate.inputs if v not in (None, selector) and self._origins.get(v, logits) is not logits]
        pending = [*gate.outputs] if forward else [*others]
        seen: set[ir.Node] = {gate}
        while pending and len(seen) <= _MAX_NODES:
            value = pending.pop()
            if value is None or value is logits:
                continue
            producer = value.producer()
            for node in [use.node for use in value.uses()] if forward else [producer] if producer else []:
                if node in seen:
                    continue
                seen.add(node)
                if is_op(node, *_PRODUCTS):
                    yield node
                else:
                    pending += node.outputs if forward else node.inputs


def _bodies(node: ir.Node) -> Iterable[ir.Graph]:
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def _multiplies_stack(product: ir.Node, size: int) -> bool:
    """Whether `product` multiplies by a constant stack of `size` matrices."""
    return any(
        _dimensions(value) >= 3 and value.shape is not None and size in value.shape.dims
        for value in product.inputs
        if value is not None
    )


def _dimensions(value: ir.Value) -> int:
    """The dimensions greater than 1 of what constants make; 0 for what else there is."""
    source = value
    while get_const_tensor(source) is None:
        producer = source.producer()
        if not is_op(producer, *ALIASES, "Transpose", "DequantizeLinear", "Concat"):
            return 0
        source = operand(producer, 0)
    shape = value.shape or source.shape
    return sum(dim != 1 for dim in shape) if shape is not None else 0


def _unaliased(value: ir.Value) -> ir.Value:
    while is_op(alias := value.producer(), *ALIASES, "Expand", "Tile"):
        value = operand(alias, 0)
    return value
