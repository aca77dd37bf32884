"""What the patterns find: linears, MLPs, MoE blocks, and the subgraphs made of them that a plan decides on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.plugins.ops.number_formats import BLOCK

if TYPE_CHECKING:
    from trt_nvfp4.graph_passes.subgraphs.attention import CacheAttention
    from trt_nvfp4.graph_passes.subgraphs.decoder import DecoderLayer

# Key of a value's `meta`: the name of the tensor of the original model that it equals but for rounding.
OBSERVED = "trt_nvfp4.observed"


@dataclass(frozen=True)
class Weight:
    """A constant matrix W [out_features, in_features], as it lies in the model.

    `stored` is the initializer, `stored_transposed` says that it is stored [in, out], `dtype` is the type it is
    multiplied in (after Casts), `scale` is Gemm's alpha, `rows` selects a part of a fused projection, `expert` one
    matrix of a constant that stacks those of several experts.
    """

    stored: ir.Value
    stored_transposed: bool
    dtype: ir.DataType
    scale: float
    shape: tuple[int, int]
    rows: slice = field(default_factory=lambda: slice(None))
    expert: int | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """Hashable; weights of equal identity are the same matrix."""
        rows = (self.rows.start, self.rows.stop, self.rows.step)
        return self.stored, self.stored_transposed, self.dtype, self.scale, self.shape, rows, self.expert


@dataclass(frozen=True)
class Bias:
    """A constant vector [out_features] (or scalar) added to a linear's output; `scale` is Gemm's beta.

    `rows` and `expert` are as in `Weight`.
    """

    stored: ir.Value
    scale: float
    rows: slice = field(default_factory=lambda: slice(None))
    expert: int | None = None


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b. `nodes` compute y from x, `multiply` is the MatMul or Gemm of them; `weight_nodes` prepare W."""

    x: ir.Value
    y: ir.Value
    weight: Weight
    bias: Bias | None
    multiply: ir.Node
    nodes: tuple[ir.Node, ...]
    weight_nodes: tuple[ir.Node, ...]

    @property
    def observed(self) -> str:
        """The name of its input in the original model, by which statistics know it."""
        return str(self.x.meta.get(OBSERVED, self.x.name or ""))

    @property
    def linears(self) -> tuple[Linear]:
        """Itself."""
        return (self,)

    @property
    def weight_values(self) -> list[ir.Value]:
        """The stored weight and what `weight_nodes` make of it."""
        return [self.weight.stored, *(value for node in self.weight_nodes for value in node.outputs)]

    @property
    def shares_weight(self) -> bool:
        """Whether the weight is read more than once."""
        return any(len(value.uses()) > 1 for value in self.weight_values)


@dataclass(frozen=True)
class Mlp:
    """y = down(act(gate(x)) * up(x)) or, without `gate`, down(act(up(x))).

    `nodes` are all nodes between x and y; `flattens` says that y is [rows, out_features] whatever x's leading
    dimensions. `alpha` and `limit` hold the constants of clamped ones.
    """

    x: ir.Value
    y: ir.Value
    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    nodes: tuple[ir.Node, ...]
    flattens: bool
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Gate (if any), up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class RMSNorm:
    """y = x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last axis; no weight means ones."""

    x: ir.Value
    weight: ir.Value | None
    offset: float
    epsilon: float
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Block:
    """[RMSNorm] -> MLP -> [residual add of x]; without norm and residual, x and y are the MLP's own."""

    x: ir.Value
    y: ir.Value
    mlp: Mlp
    norm: RMSNorm | None = None
    add: ir.Node | None = None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes of the block."""
        norm = () if self.norm is None else self.norm.nodes
        return (*norm, *self.mlp.nodes, *(() if self.add is None else (self.add,)))


@dataclass(frozen=True)
class Routing:
    """How a router's logits choose experts and weigh them: the attributes of `NVFP4MoE` of the same names.

    `scoring` is a member of `trt_nvfp4.plugins.ops.moe_routing.Scoring` in lower case; `correction_bias` is a constant
    [experts] that is added for choosing only. `given` holds the numbers of the chosen experts and their
    weights, both [..., top_k], where the model computes them (`scoring` "given"; without them the logits are weights).
    """

    top_k: int
    scoring: str
    renormalize: bool = False
    scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score_top: int = 1
    scale_input: bool = False
    correction_bias: ir.Value | None = None
    given: tuple[ir.Value, ir.Value] | None = None


@dataclass(frozen=True)
class Moe:
    """y = sum of weight * expert(x) over the experts that the router's logits choose, + shared(x) [* sigmoid(gate)].

    `x` and `logits` have the same leading dimensions. `y_like` is a tensor with those of y where they are others.
    `nodes` are all nodes that compute y and nothing else. `routed` is the part of the block without the shared expert.
    """

    x: ir.Value
    logits: ir.Value
    y: ir.Value
    y_like: ir.Value | None
    router: Linear
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: Mlp | None
    shared_gate: Linear | None
    nodes: tuple[ir.Node, ...]
    routed: Moe | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those of all experts, then those of the shared one."""
        mlps = self.experts if self.shared is None else (*self.experts, self.shared)
        return tuple(linear for mlp in mlps for linear in mlp.linears)


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
            head_dim, capacity and window (0: none) of an "attention" and of a "decoder", which has hidden_features too.
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
            return "NVFP4Decoder"
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
