"""Finds recurrences over states, which ONNX has an operator for."""

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.subgraphs.recurrent import OP, RecurrentSubgraph

_KEY, _VALUE, _DECAY = 1, 2, 4


def recurrent_subgraphs(graph: ir.Graph, position: Mapping[ir.Node, int]) -> Iterator[tuple[int, RecurrentSubgraph]]:
    """(place in the graph, subgraph) of every LinearAttention, under the node's name."""
    for node in graph:
        if not is_op(node, OP):
            continue
        assert node.name is not None
        x = operand(node, 0)
        yield (
            position[node],
            RecurrentSubgraph(
                name=node.name,
                nodes=(node.name,),
                input=x.name or "",
                output=node.outputs[0].name or "",
                shapes=_shapes(node),
                activation="",
                dtype="" if x.dtype is None else x.dtype.numpy().name,
            ),
        )


def _shapes(node: ir.Node) -> dict[str, int]:
    """Sizes of heads are 0 where the graph does not state them."""
    q_heads, heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
    widths = [_width(node, index) for index in (_KEY, _VALUE, _DECAY)]
    key_dim, value_dim, decay_dim = (width // heads for width in widths)
    return {"q_heads": q_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "decay_dim": decay_dim}


def _width(node: ir.Node, index: int) -> int:
    value = node.inputs[index] if index < len(node.inputs) else None
    last = None if value is None or value.shape is None else value.shape[-1]
    return last if isinstance(last, int) else 0
