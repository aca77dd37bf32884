"""What the patterns find: linears, MLPs, and the subgraphs made of them that a plan decides on."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass(frozen=True)
class Weight:
    """A constant matrix W [out_features, in_features], as it lies in the model.

    `stored` is the initializer, `stored_transposed` says that it is stored [in, out], `dtype` is the type it is
    multiplied in (after Casts), `scale` is Gemm's alpha, `rows` selects a part of a fused projection.
    """

    stored: ir.Value
    stored_transposed: bool
    dtype: ir.DataType
    scale: float
    shape: tuple[int, int]
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Bias:
    """A constant vector [out_features] (or scalar) added to a linear's output; `scale` is Gemm's beta."""

    stored: ir.Value
    scale: float
    rows: slice = field(default_factory=lambda: slice(None))


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


@dataclass(frozen=True)
class Mlp:
    """y = down(act(gate(x)) * up(x)) or, without `gate`, down(act(up(x))).

    `nodes` are all nodes between x and y; `flattens` says that y is [rows, out_features] whatever x's leading
    dimensions. For `swiglu_clamped`, `alpha` and `limit` hold its constants.
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
    y: ir.Value
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
class Subgraph:
    """One candidate for replacement.

    Attributes:
        name: unique in the model and stable; the name of the node that replaces the subgraph.
        kind: "gated_mlp", "mlp" or "linear".
        nodes: the names of the nodes to be replaced, in graph order.
        input, output: tensor names.
        shapes: in_features, intermediate_features (not for a linear), out_features, layers.
        activation: a member of `trt_nvfp4.plugins.ops.Activation` in lower case, or the operators that were met.
        dtype: of the activations: "float32", "float16" or "bfloat16".
        refusal: why it cannot be replaced, or None.
        blocks: the MLP blocks in order (one, or several merged); empty for a linear.
        linear: the linear of a "linear".
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
    blocks: tuple[Block, ...] = ()
    linear: Linear | None = None

    @property
    def op(self) -> str:
        """The NVFP4 op that serves it."""
        if self.kind == "linear":
            return "NVFP4Linear"
        # A plain MLP is a persistent one of one layer.
        return "NVFP4GatedMLP" if self.kind == "gated_mlp" and len(self.blocks) == 1 else "NVFP4PersistentMLP"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every linear of the subgraph, gate before up before down."""
        if self.linear is not None:
            return (self.linear,)
        return tuple(part for block in self.blocks for part in block.mlp.linears)
