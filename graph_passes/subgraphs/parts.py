"""The parts of subgraphs: weights, linears, MLPs, norms, MoE blocks."""

from dataclasses import dataclass, field

import onnx_ir as ir

# Key of a value's `meta`: the name of the tensor of the original model that it equals but for rounding.
OBSERVED = "trt_nvfp4.observed"
# Key of a weight's `meta`: the largest magnitudes of the weight that it is one rank's share of, one for each expert.
WHOLE_AMAX = "trt_nvfp4.whole_amax"


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
    def linears(self) -> "tuple[Linear]":
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
class FirstProducts:
    """The linears that read one input `x` of a subgraph, those of one weight together.

    `beside`: linears of the subgraph that may read it too and are not quantized, such as a router; `nodes`: its other
    nodes that may.
    """

    x: ir.Value
    matrices: list[list[Linear]]
    beside: tuple[Linear, ...] = ()
    nodes: tuple[ir.Node, ...] = ()


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
    routed: "Moe | None" = None

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """All experts, then the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those of all experts, then those of the shared one."""
        return tuple(linear for mlp in self.mlps for linear in mlp.linears)
