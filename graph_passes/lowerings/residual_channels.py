"""Where W4A4 plugins look at heavy channels twice: which subgraphs, in what order of channels, and the node that puts
those of an input in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import RESIDUALS, Recipe
from trt_nvfp4.graph_passes.ir.nodes import register
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.subgraphs.types import Linear, Mlp, Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices


@dataclass(frozen=True)
class ResidualChannels:
    """`count` channels of each activation of a subgraph, 0: none. `input`: the order of the channels of what it reads;
    `hidden`: of the hidden activations, by the value that down reads, which weights alone put in order."""

    count: int = 0
    input: torch.Tensor | None = None
    hidden: Mapping[ir.Value, torch.Tensor] = field(default_factory=dict)

    def columns(self, linears: Sequence[Linear]) -> torch.Tensor | None:
        """Of the weight of `linears`, down or what reads the input."""
        return self.hidden.get(linears[0].x, self.input)

    def rows(self, mlp: Mlp, is_down: bool) -> torch.Tensor | None:
        """Of the weights of gate and up; those of down stay."""
        return None if is_down else self.hidden.get(mlp.down.x)


NO_RESIDUAL = ResidualChannels()
#: Those with NVFP4 activations that may have residual channels.
RESIDUAL_DECISIONS = (Decision.NVFP4_W4A4, Decision.NVFP4_MIXED)


def residual_obstacle(
    subgraph: Subgraph, recipe: Recipe, checkpoint: NVFP4Checkpoint | None = None, is_mixed: bool = False
) -> str | None:
    """Why W4A4 products of the subgraph do without the recipe's residual channels. `is_mixed`: gate and up alone
    read NVFP4, as linears, and the subgraph's norms and residuals stay as they are."""
    has_more = any(block.norm is not None or block.add is not None for block in subgraph.blocks)
    if not is_mixed and (has_more or len(subgraph.blocks) > 1):
        return "a plugin with norm, residual or several layers does not reorder the channels of its input"
    products = subgraph.linears
    if is_mixed:
        products = tuple(linear for block in subgraph.blocks for linear in block.mlp.linears[:-1])
    if any(linear.weight.shape[1] < recipe.residual for linear in products):
        return f"a product reads fewer than {recipe.residual} channels"
    if odd := [k for linear in products if (k := linear.weight.shape[1]) % 32]:
        return f"K = {odd[0]} is no multiple of 32, the tensor cores' step"
    if checkpoint is not None and any(held_matrices(checkpoint, subgraph)):
        return "its weights are taken from a checkpoint, whose blocks cannot be reordered"
    return None


def residual_counts(
    subgraphs: Sequence[Subgraph], decision: Decision, recipe: Recipe, checkpoint: NVFP4Checkpoint | None = None
) -> Sequence[int] | Sequence[None]:
    """How many residual channels `subgraphs`, which share weights, may have by the decision: none up to the recipe's,
    least first; None alone where the recipe has none. `checkpoint`: what has their weights already, if anything."""
    if not recipe.residual or decision not in RESIDUAL_DECISIONS:
        return [None]
    is_mixed = decision == Decision.NVFP4_MIXED
    allowed = [replace(recipe, residual=count) for count in RESIDUALS.values() if count <= recipe.residual]
    for subgraph in subgraphs:
        allowed = [some for some in allowed if residual_obstacle(subgraph, some, checkpoint, is_mixed) is None]
    return [0, *(some.residual for some in allowed)]


def residual_channels(context: LoweringContext, subgraph: Subgraph, mixed: Mlp | None = None) -> ResidualChannels:
    """Those of the recipe, where the subgraph allows them. `mixed`: the MLP of it whose gate and up alone read NVFP4,
    as linears."""
    recipe, quantization = context.recipe, context.quantization
    obstacle = residual_obstacle(subgraph, recipe, context.checkpoint, mixed is not None)
    if not recipe.residual or obstacle is not None:
        return NO_RESIDUAL
    if mixed is not None:
        return ResidualChannels(recipe.residual, quantization.residual_order(mixed.linears[:-1], recipe.residual))
    mlps = [block.mlp for block in subgraph.blocks]
    if subgraph.moe is not None:
        mlps = [*subgraph.moe.experts, *([] if subgraph.moe.shared is None else [subgraph.moe.shared])]
    readers = list(subgraph.projections) or [linear for mlp in mlps for linear in mlp.linears[:-1]]
    hidden = {mlp.down.x: quantization.residual_order([mlp.down], recipe.residual) for mlp in mlps}
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
