"""Plugin nodes that a model already holds, as subgraphs of a plan."""

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import operand
from trt_nvfp4.graph_passes.load.by_hand import is_plugin
from trt_nvfp4.graph_passes.subgraphs.by_hand import ByHandSubgraph
from trt_nvfp4.plugins.ops import Activation


def by_hand_subgraphs(graph: ir.Graph, position: Mapping[ir.Node, int]) -> Iterator[tuple[int, ByHandSubgraph]]:
    """(place in the graph, subgraph) of every plugin node, under the node's name."""
    for node in filter(is_plugin, graph):
        assert node.name is not None
        x = operand(node, 0)
        activation = node.attributes.get("activation")
        yield (
            position[node],
            ByHandSubgraph(
                name=node.name,
                nodes=(node.name,),
                input=x.name or "",
                output=node.outputs[0].name or "",
                shapes={},
                activation="" if activation is None else Activation(activation.as_int()).name.lower(),
                dtype="" if x.dtype is None else x.dtype.numpy().name,
                plugin=node.op_type,
            ),
        )
