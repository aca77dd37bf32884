"""Subgraphs of products with constant matrices: linears, MLPs and mixtures of experts."""

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.parts import Block, FirstProducts, Linear, Mlp, Moe
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops.number_formats import BLOCK


@dataclass(frozen=True, kw_only=True)
class ProductSubgraph(Subgraph):
    """Products with weights, which may be quantized."""

    @property
    def mixed_types(self) -> Reason | None:
        """The Reason where an MLP's linears multiply in different types, as those of T5 in float16 do; else None."""
        for mlp in self.mlps:
            first, last = (linear.weight.dtype.numpy().name for linear in (mlp.up, mlp.down))
            if first != last:
                return Reason(
                    ReasonCode.MIXED_TYPES,
                    f"its linears multiply in different types: {first}, and '{mlp.down.multiply.name}' in {last}",
                )
        return None

    def unaligned_k(self, what: str) -> Reason | None:
        """The Reason where K of a weight is not a multiple of the 16 values that `what` takes at a time; else None."""
        for linear in self.linears:
            if (k := linear.weight.shape[1]) % BLOCK:
                return Reason(
                    ReasonCode.K_ALIGNMENT,
                    f"{what} needs K to be a multiple of {BLOCK}: weight '{linear.weight.stored.name}' of node "
                    f"'{linear.multiply.name}' has K = {k}",
                )
        return None


@dataclass(frozen=True, kw_only=True)
class LinearSubgraph(ProductSubgraph):
    """One linear, or several of one input that one product can compute.

    `shapes`: in_features, out_features (of all `projections` together).
    """

    kind = "linear"

    projections: tuple[Linear, ...]

    @property
    def op(self) -> str:
        return "NVFP4Linear"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.projections

    @property
    def matrices(self) -> list[tuple[Linear, ...]]:
        return [self.projections]

    @property
    def checkpoint_matrices(self) -> list[tuple[Linear, ...]]:
        return [(linear,) for linear in self.projections]

    @property
    def first_products(self) -> list[FirstProducts]:
        return [FirstProducts(self.projections[0].x, [list(self.projections)])]


@dataclass(frozen=True, kw_only=True)
class MlpSubgraph(ProductSubgraph):
    """An MLP without a gate, or several consecutive ones with their norms and residuals.

    `shapes`: in_features, intermediate_features, out_features, layers (the number of `blocks`).
    """

    kind = "mlp"

    blocks: tuple[Block, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it is one MLP without norm and residual."""
        return len(self.blocks) == 1 and self.blocks[0].norm is None and self.blocks[0].add is None

    @property
    def op(self) -> str:
        return "NVFP4PersistentMLP"

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        return tuple(block.mlp for block in self.blocks)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for mlp in self.mlps for linear in mlp.linears)

    @property
    def matrices(self) -> list[tuple[Linear, ...]]:
        return [*(mlp.linears[:-1] for mlp in self.mlps), *((mlp.down,) for mlp in self.mlps)]

    @property
    def first_products(self) -> list[FirstProducts]:
        return [FirstProducts(mlp.up.x, [list(mlp.linears[:-1])]) for mlp in self.mlps]


@dataclass(frozen=True, kw_only=True)
class GatedMlpSubgraph(MlpSubgraph):
    """The same with gates."""

    kind = "gated_mlp"

    @property
    def op(self) -> str:
        return "NVFP4GatedMLP" if len(self.blocks) == 1 else "NVFP4PersistentMLP"


@dataclass(frozen=True, kw_only=True)
class MoeSubgraph(ProductSubgraph):
    """A mixture of experts; `moe` is None for one that cannot be replaced.

    `shapes`: in_features, intermediate_features, out_features, experts, top_k, shared_features (0: no shared expert),
    gated (1 or 0, of all experts); of one that cannot be replaced in_features, experts and top_k.
    """

    kind = "moe"

    moe: Moe | None

    @property
    def op(self) -> str:
        return "NVFP4MoE"

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        return () if self.moe is None else self.moe.mlps

    @property
    def linears(self) -> tuple[Linear, ...]:
        return () if self.moe is None else self.moe.linears

    @property
    def first_products(self) -> list[FirstProducts]:
        if self.moe is None:
            return []
        beside = tuple(linear for linear in (self.moe.router, self.moe.shared_gate) if linear is not None)
        return [FirstProducts(self.moe.x, [list(mlp.linears[:-1]) for mlp in self.mlps], beside, self.moe.nodes)]
