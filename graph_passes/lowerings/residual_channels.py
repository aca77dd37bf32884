"""Where W4A4 plugins look at heavy channels twice: which subgraphs, in what order of channels, and the node that puts
those of an input in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import RESIDUALS, Recipe
from trt_nvfp4.graph_passes.ir.nodes import register
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp
from trt_nvfp4.graph_passes.subgraphs.products import MlpSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices


@dataclass(frozen=True)
class ResidualChannels:
    """`count` channels of each activation of a subgraph, 0: none. `input`: the order of the channels of what it reads;
    `hidden`: the order of hidden activations, by the value that down reads; only weights are reordered for it."""

    count: int = 0
    input: torch.Tensor | None = None
    hidden: Mapping[ir.Value, torch.Tensor] = field(default_factory=dict)

    def columns(self, linears: Sequence[Linear]) -> torch.Tensor | None:
        """The order of the columns of the weight of `linears`: down, or linears that read the input."""
        return self.hidden.get(linears[0].x, self.input)

    def rows(self, mlp: Mlp, is_down: bool) -> torch.Tensor | None:
        """The order of the rows of gate and up; None for down, whose rows stay."""
        return None if is_down else self.hidden.get(mlp.down.x)


NO_RESIDUAL = ResidualChannels()
#: Those with NVFP4 activations that may have residual channels.
RESIDUAL_DECISIONS = (Decision.NVFP4_W4A4, Decision.NVFP4_MIXED)


def residual_unsupported(
    subgraph: Subgraph, recipe: Recipe, checkpoint: NVFP4Checkpoint | None = None, is_mixed: bool = False
) -> str | None:
    """Why W4A4 products of the subgraph do without the recipe's residual channels. `is_mixed`: only gate
    and up read NVFP4, as linears, and the subgraph's norms and residuals stay as they are."""
    if not is_mixed and isinstance(subgraph, MlpSubgraph) and not subgraph.is_plain:
        return "a plugin with norm, residual or several layers does not reorder the channels of its input"
    products = subgraph.linears
    if is_mixed:
        products = tuple(linear for mlp in subgraph.mlps for linear in mlp.linears[:-1])
    if any(linear.weight.shape[1] < recipe.residual for linear in products):
        return f"a product reads fewer than {recipe.residual} channels"
    if odd := [k for linear in products if (k := linear.weight.shape[1]) % 32]:
        return f"K = {odd[0]} is not a multiple of 32, the tensor cores' step"
    if checkpoint is not None and any(held_matrices(checkpoint, subgraph)):
        return "its weights are taken from a checkpoint, whose blocks cannot be reordered"
    return None


def residual_counts(
    subgraphs: Sequence[Subgraph], decision: Decision, recipe: Recipe, checkpoint: NVFP4Checkpoint | None = None
) -> Sequence[int] | Sequence[None]:
    """The numbers of residual channels that `subgraphs`, which share weights, may have by the decision, from 0 up to
    the recipe's; [None] where the recipe has none. `checkpoint`: what has their weights already, if anything."""
    if not recipe.residual or decision not in RESIDUAL_DECISIONS:
        return [None]
    is_mixed = decision == Decision.NVFP4_MIXED
    allowed = [replace(recipe, residual=count) for count in RESIDUALS.values() if count <= recipe.residual]
    for subgraph in subgraphs:
        allowed = [some for some in allowed if residual_unsupported(subgraph, some, checkpoint, is_mixed) is None]
    return [0, *(some.residual for some in allowed)]


def residual_channels(context: LoweringContext, subgraph: Subgraph, mixed: Mlp | None = None) -> ResidualChannels:
    """The recipe's residual channels, where the subgraph allows them. `mixed`: the MLP of it of which only gate and up
    read NVFP4, as linears."""
    recipe, quantization = context.recipe, context.quantization
    if not recipe.residual or residual_unsupported(subgraph, recipe, context.checkpoint, mixed is not None) is not None:
        return NO_RESIDUAL
    if mixed is not None:
        return ResidualChannels(recipe.residual, quantization.residual_order(mixed.linears[:-1], recipe.residual))
    readers = [linear for first in subgraph.first_products for matrix in first.matrices for linear in matrix]
    hidden = {mlp.down.x: quantization.residual_order([mlp.down], recipe.residual) for mlp in subgraph.mlps}
    return ResidualChannels(recipe.residual, quantization.residual_order(readers, recipe.residual), hidden)


def in_order(context: LoweringContext, x: ir.Value, channels: ResidualChannels, name: str) -> list[ir.Node]:
    """The node, if any, that puts the channels of `x` in order, called `name`; its output is what the plugin reads."""
    if channels.input is None:
        return []
    order = ir.tensor(channels.input.tolist(), ir.DataType.INT64, f"{name}/order")
    operand = ir.val(order.name, const_value=order)
    register(context.graph, operand)
    node = ir.node("Gather", [x, operand], {"axis": -1}, name=name)
    node.outputs[0].name, node.outputs[0].type = f"{name}/output", x.type
    return [node]
