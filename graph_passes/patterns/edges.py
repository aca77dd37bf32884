"""The linears at both ends of a denoiser: embedders of its inputs, and the projection to its output."""

from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.subgraphs.products import LinearSubgraph, ProductSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

_CONVOLUTIONS = ("Conv", "ConvTranspose")


def edge_subgraphs(model: SourceModel, subgraphs: Iterable[Subgraph]) -> dict[str, str]:
    """Subgraph name -> why its precision is the whole model's.

    An embedder is the only product that reads an input of the model before any other product does (a text that every
    block projects has none); behind the last product there is no other one.
    """
    products = [subgraph for subgraph in subgraphs if isinstance(subgraph, ProductSubgraph)]
    own = {name for subgraph in products for name in subgraph.nodes}
    multiplies = {
        node
        for node in model.graph
        if is_op(node, *_CONVOLUTIONS) or (node.name in own and is_op(node, "MatMul", "Gemm"))
    }
    before, leading = _inputs_before(model.graph, multiplies), _leading(model.graph, multiplies)
    values = {value.name: value for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    first = {subgraph.name: before.get(values[subgraph.input]) for subgraph in products}
    readers = Counter(name for inputs in first.values() for name in inputs or ())
    found = {}
    for subgraph in products:
        inputs = first[subgraph.name]
        outputs = [part.y for part in subgraph.projections] if isinstance(subgraph, LinearSubgraph) else []
        if inputs and all(readers[name] == 1 for name in inputs):
            found[subgraph.name] = f"it embeds the input {', '.join(sorted(inputs))}: its error is every block's"
        elif not leading.intersection(outputs or [values[subgraph.output]]):
            found[subgraph.name] = "it makes the output: no block corrects its error"
    return found


def _inputs_before(graph: ir.Graph, products: set[ir.Node]) -> dict[ir.Value, frozenset[str]]:
    """For values with no product before them, the graph's inputs that they are made of."""
    found: dict[ir.Value, frozenset[str]] = {value: frozenset([value.name or ""]) for value in graph.inputs}
    behind: set[ir.Value] = set()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if node in products or behind.intersection(inputs):
            behind.update(node.outputs)
        elif not is_op(node, "Shape", "Size"):
            made_of = frozenset().union(*(found.get(value, frozenset()) for value in inputs))
            found |= dict.fromkeys(node.outputs, made_of)
    return found


def _leading(graph: ir.Graph, products: set[ir.Node]) -> set[ir.Value]:
    """Values that a product comes after."""
    found: set[ir.Value] = set()
    for node in reversed(graph):
        if node in products or found.intersection(node.outputs):
            found.update(value for value in node.inputs if value is not None)
    return found
