"""Attention blocks over caches as subgraphs that a plan decides on."""

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from trt_nvfp4.graph_passes.patterns.attention.match import UnsupportedAttention, match_attentions
from trt_nvfp4.graph_passes.patterns.names import subgraph_name
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode


def attention_subgraphs(
    model: ir.Model, position: Mapping[ir.Node, int], taken: set[str]
) -> Iterator[tuple[int, AttentionSubgraph]]:
    """(place in the graph, subgraph) of every attention over a cache; `taken` are names in use."""
    for found in match_attentions(model):
        core = found.core
        assert core.name is not None
        name = subgraph_name([core], AttentionSubgraph.kind, taken, part="attention")
        result = core.outputs[0] if isinstance(found, UnsupportedAttention) else found.result
        if isinstance(found, UnsupportedAttention):
            yield (
                position[core],
                AttentionSubgraph(
                    name=name,
                    nodes=(core.name,),
                    input=core.inputs[0].name or "" if core.inputs[0] is not None else "",
                    output=result.name or "",
                    shapes={},
                    activation="",
                    dtype=_dtype(result),
                    unsupported=Reason(ReasonCode.NOT_REPLACEABLE, found.reason),
                    attention=None,
                ),
            )
            continue
        yield (
            position[core],
            AttentionSubgraph(
                name=name,
                nodes=tuple(str(node.name) for node in found.nodes),
                input=found.query.value.name or "",
                output=result.name or "",
                shapes={
                    "heads": found.query.heads,
                    "kv_heads": found.key.heads,
                    "head_dim": found.head_dim,
                    "capacity": found.capacity,
                    "window": found.window,
                },
                activation="",
                dtype=_dtype(found.past[0]),
                attention=found,
            ),
        )


def _dtype(value: ir.Value) -> str:
    names = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
    return names.get(value.dtype or ir.DataType.FLOAT, "float32")
