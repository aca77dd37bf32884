"""Linears of one input that one product can compute, such as Q, K and V: their weights joined along the output axis."""

from bisect import bisect
from collections.abc import Hashable, Iterable, Mapping

import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraphs.parts import Linear

# Where attention is computed: linears before and behind it belong to different layers.
_ATTENTION = ("Softmax", "Attention", "GroupQueryAttention", "MultiHeadAttention", "CachedAttention")


def join_linears(
    linears: Iterable[tuple[Linear, Hashable]], graph: ir.Graph, position: Mapping[ir.Node, int]
) -> list[tuple[Linear, ...]]:
    """Groups of `linears` with the same input and type, each given with what it may only be joined within.

    Linears with attention between them stay apart: every layer of a decoder projects the same output of the encoder,
    and one product for all layers would keep all their results in memory. So do two of the same weight, which another
    network that the graph calls may share as a whole.
    """
    attention = [index for node, index in position.items() if node.op_type in _ATTENTION]
    groups: dict[tuple[Hashable, ...], list[Linear]] = {}
    for linear, within in linears:
        layer = bisect(attention, position[linear.multiply])
        key: tuple[Hashable, ...] = (linear.x, linear.weight.dtype, within, layer)
        while any(other.weight.identity == linear.weight.identity for other in groups.get(key, ())):
            key = (*key, "again")
        groups.setdefault(key, []).append(linear)
    return [tuple(sorted(group, key=lambda linear: position[linear.multiply])) for group in groups.values()]
