"""A decoder layer, which one launch can compute with its neighbours."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraphs.attention import CacheAttention
from trt_nvfp4.graph_passes.subgraphs.parts import Mlp, Moe, RMSNorm
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """r = x + output(attention(qkv(norm(x)))), y = r + mlp(norm(r)).

    `norms` are those in front of attention and MLP. `parts` are the names of the subgraphs that compute qkv, attention,
    output and MLP; `moe` is the mixture that stands for the MLP, `mlp` then its first expert. `nodes` are all nodes
    between x and y, those of the parts included. `number` is the layer's in the names of its caches,
    past_key_values.{number}.key and .value.
    """

    number: int
    x: ir.Value
    y: ir.Value
    norms: tuple[RMSNorm, RMSNorm]
    attention: CacheAttention
    mlp: Mlp
    parts: tuple[str, str, str, str]
    nodes: tuple[ir.Node, ...]
    moe: Moe | None = None

    @property
    def weights(self) -> frozenset[object]:
        """Identities of the MLP's weights: a chain that has one twice would hold it twice."""
        linears = self.mlp.linears if self.moe is None else self.moe.linears
        return frozenset(linear.weight.identity for linear in linears)

    def continues(self, before: "DecoderLayer") -> bool:
        """Whether it takes what `before` gives, nothing else does, and both compute alike."""
        if self.x is not before.y or before.y.is_graph_output() or self.number != before.number + 1:
            return False
        if any(use.node not in self.nodes for use in before.y.uses()):
            return False
        rotations = (self.attention.rotation, before.attention.rotation)
        tables = [(rotation.cos, rotation.sin) for rotation in rotations]
        equal = all(one is other or np.array_equal(one, other) for one, other in zip(*tables, strict=True))
        return equal and self._alike == before._alike

    @property
    def _alike(self) -> tuple[object, ...]:
        attention, mlp = self.attention, self.mlp
        return (
            self.x.dtype,
            attention.past_length,
            *(attention.query.heads, attention.key.heads, attention.head_dim, attention.capacity, attention.window),
            *(attention.scale, attention.softcap, attention.rotation.kind, attention.norms is None),
            attention.past[0].dtype,
            self.norms[0].epsilon,
            *(mlp.activation, mlp.alpha, mlp.limit, mlp.up.weight.shape, mlp.down.weight.shape),
            None if self.moe is None else (len(self.moe.experts), self.moe.routing),
        )


@dataclass(frozen=True, kw_only=True)
class DecoderLayerSubgraph(Subgraph):
    """A decoder layer, whose parts are subgraphs too; `layer` is None for one that cannot be replaced.

    `shapes`: those of its attention, hidden_features, intermediate_features and, with a mixture, experts and top_k; of
    one that cannot be replaced those of its attention.
    """

    kind = "decoder"

    layer: DecoderLayer | None

    @property
    def op(self) -> str:
        return "NVFP4MoEDecoder" if "experts" in self.shapes else "NVFP4Decoder"
