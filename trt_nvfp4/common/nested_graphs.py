"""The graphs in the attributes of an ONNX model's nodes: the bodies of control flow."""

from collections.abc import Iterator

from onnx import GraphProto, NodeProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """A node's own."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def within(node: NodeProto) -> Iterator[GraphProto]:
    """A node's own, each behind all graphs in it."""
    for body in bodies(node):
        yield from nested(body)


def nested(graph: GraphProto) -> Iterator[GraphProto]:
    """All graphs in `graph`, then itself: its nodes may be replaced when it is its turn."""
    for node in graph.node:
        yield from within(node)
    yield graph
