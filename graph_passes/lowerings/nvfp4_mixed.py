"""Lowers MLPs to two plugin nodes: gate and up read NVFP4 activations, down reads them in 16 bits.

The hidden activations lose most in 4 bits. The model's own nodes between the products stay, so that any activation
function serves."""

from dataclasses import replace

import onnx_ir as ir

from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import lower_linears
from trt_nvfp4.graph_passes.lowerings.residual_channels import NO_RESIDUAL, residual_channels
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.products import MlpSubgraph

OP = "NVFP4Linear"


def mixed_statistics(recipe: Recipe) -> frozenset[str]:
    """The statistics that the weights need: `recipe` makes gate and up, what it is for 16-bit activations down."""
    return recipe.needs | recipe.residual_needs | recipe.for_16_bit_activations().needs


def lower_nvfp4_mixed(context: LoweringContext, subgraph: MlpSubgraph) -> list[str]:
    """Replaces the products of each MLP by one NVFP4Linear for gate and up, W4A4, and one for down, W4A16; returns
    their names. Norms, residuals and activation functions stay."""
    names = []
    in_16_bits = replace(context, recipe=context.recipe.for_16_bit_activations())
    # From the last to the first, so that no product is replaced before those that read its output.
    for index, block in reversed(list(enumerate(subgraph.blocks))):
        prefix = subgraph.name if len(subgraph.blocks) == 1 else f"{subgraph.name}/{index}"
        names += lower_linears(in_16_bits, f"{prefix}/down", (block.mlp.down,), False, NO_RESIDUAL)
        channels = residual_channels(context, subgraph, block.mlp)
        by_input: dict[ir.Value, list[Linear]] = {}
        for linear in block.mlp.linears[:-1]:
            by_input.setdefault(linear.x, []).append(linear)
        for number, linears in enumerate(by_input.values()):
            name = f"{prefix}/up" if number == 0 else f"{prefix}/up_{number}"
            names += lower_linears(context, name, tuple(linears), True, channels)
    return names
