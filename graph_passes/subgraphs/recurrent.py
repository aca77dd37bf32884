"""A recurrence over a state: ONNX's LinearAttention."""

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

OP = "LinearAttention"


@dataclass(frozen=True, kw_only=True)
class RecurrentSubgraph(Subgraph):
    """One node, whose state is read and written at every step.

    `shapes`: q_heads, heads (of keys, values and the state), key_dim, value_dim and decay_dim (0: no decay, 1: one per
    head, else key_dim).
    """

    kind = "recurrent"

    @property
    def op(self) -> str:
        return OP
