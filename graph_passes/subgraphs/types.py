"""What the patterns find: the subgraphs that a plan decides on. Their parts are in `parts`."""

from __future__ import annotations

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.attention import CacheAttention
from trt_nvfp4.graph_passes.subgraphs.decoder import DecoderLayer
from trt_nvfp4.graph_passes.subgraphs.parts import OBSERVED, Bias, Block, Linear, Mlp, Moe, RMSNorm, Routing, Weight
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.plugins.ops.number_formats import BLOCK

__all__ = ["OBSERVED", "Bias", "Block", "Linear", "Mlp", "Moe", "RMSNorm", "Routing", "Subgraph", "Weight"]


@dataclass(frozen=True)
class Subgraph:
    """One candidate for replacement.

    Attributes:
        name: unique in the model and stable; the name of the node that replaces the subgraph.
        kind: "moe", "gated_mlp", "mlp", "linear", "attention", or "by_hand": a plugin node that the model brought.
        nodes: the names of the nodes to be replaced, in graph order.
        input, output: tensor names; of joined linears, `output` is the first one's.
        shapes: in_features, intermediate_features (not for a linear), out_features; layers of merged MLPs; experts,
            top_k, shared_features (0: no shared expert) and gated (1 or 0, of all experts) of a "moe"; heads, kv_heads,
            head_dim, capacity and window (0: none) of an "attention" and of a "decoder", which has hidden_features too
            and, of a mixture, experts and top_k.
        activation: a member of `trt_nvfp4.plugins.ops.Activation` in lower case, or the operators that were met.
        dtype: of the activations: "float32", "float16" or "bfloat16".
        refusal: why it cannot be replaced, or None.
        caution: why it is better left as it is unless a plan asks for more, or None.
        blocks: the MLP blocks in order (one, or several merged); empty for a linear.
        projections: the linears of a "linear": one, or several of one input, which one product can compute.
        moe: the block of a "moe" that can be replaced.
        attention: the block of an "attention" that can be replaced.
        layer: that of a "decoder" that can be; its parts are subgraphs of their own.
        by_hand: the op of a plugin node that the model brought.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    input: str
    output: str
    shapes: dict[str, int]
    activation: str
    dtype: str
    refusal: str | None
    caution: str | None = None
    blocks: tuple[Block, ...] = ()
    projections: tuple[Linear, ...] = ()
    moe: Moe | None = None
    attention: CacheAttention | None = None
    layer: DecoderLayer | None = None
    by_hand: str = ""

    @property
    def op(self) -> str:
        """The plugin that serves it."""
        if self.kind == "decoder":
            return "NVFP4MoEDecoder" if "experts" in self.shapes else "NVFP4Decoder"
        if self.by_hand:
            return self.by_hand
        if self.kind == "attention":
            return "CachedAttention"
        if self.kind == "moe":
            return "NVFP4MoE"
        if self.kind == "linear":
            return "NVFP4Linear"
        # A plain MLP is a persistent one of one layer.
        return "NVFP4GatedMLP" if self.kind == "gated_mlp" and len(self.blocks) == 1 else "NVFP4PersistentMLP"

    @property
    def mixed_types(self) -> Reason | None:
        """Why no one type serves an MLP: its linears multiply in different ones, as those of T5 in float16 do.

        None where they all multiply in one.
        """
        for mlp in (block.mlp for block in self.blocks):
            first, last = (linear.weight.dtype.numpy().name for linear in (mlp.up, mlp.down))
            if first != last:
                return Reason(
                    ReasonCode.MIXED_TYPES,
                    f"its linears multiply in different types: {first}, and '{mlp.down.multiply.name}' in {last}",
                )
        return None

    @property
    def linear_inputs(self) -> list[str]:
        """The names of the tensors that the linears multiply, or of the keys and values that an attention caches."""
        if self.attention is not None:
            return [str(value.meta.get(OBSERVED, value.name)) for value in self.attention.appended]
        return list(dict.fromkeys(linear.observed for linear in self.linears))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every linear of the subgraph, gate before up before down."""
        if self.projections:
            return self.projections
        if self.moe is not None:
            return self.moe.linears
        return tuple(part for block in self.blocks for part in block.mlp.linears)

    @property
    def matrices(self) -> list[tuple[Linear, ...]]:
        """The linears of each weight that an op takes: gate with up, those that are joined, the others alone; not of a
        "moe"."""
        if self.projections:
            return [self.projections]
        mlps = [block.mlp for block in self.blocks]
        return [*(mlp.linears[:-1] for mlp in mlps), *((mlp.down,) for mlp in mlps)]

    def k_obstacle(self, what: str) -> Reason | None:
        """Why the K of a weight keeps `what`, whose scales or kernels take 16 values at a time, from computing it."""
        for linear in self.linears:
            if (k := linear.weight.shape[1]) % BLOCK:
                return Reason(
                    ReasonCode.K_ALIGNMENT,
                    f"{what} needs K to be a multiple of {BLOCK}: weight '{linear.weight.stored.name}' of node "
                    f"'{linear.multiply.name}' has K = {k}",
                )
        return None
