"""Lowers an MoE block to one NVFP4MoE node; the experts' weights are quantized one by one while they are written."""

from collections.abc import Sequence

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.moe_node import expert_inputs, largest_inputs, replace_moe
from trt_nvfp4.graph_passes.lowerings.residual_channels import (
    NO_RESIDUAL,
    in_order,
    residual_channels,
)
from trt_nvfp4.graph_passes.subgraphs.parts import Mlp
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.values import initializer
from trt_nvfp4.graph_passes.weights.checkpoint_experts import PackedExperts
from trt_nvfp4.graph_passes.weights.checkpoint_weights import packed_initializers
from trt_nvfp4.graph_passes.weights.mlp_inputs import linears_of
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.number_formats import tensor_scale
from trt_nvfp4.plugins.ops.weight_format import NVFP4

_OP = OPS["NVFP4MoE"]


def lower_nvfp4_moe(context: LoweringContext, subgraph: MoeSubgraph, quantize_activations: bool) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name; returns that name.

    4-bit activations without known range are scaled at run time.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    quantization = context.quantization
    channels = residual_channels(context, subgraph) if quantize_activations else NO_RESIDUAL
    packed = None if quantization.checkpoint is None else PackedExperts.find(quantization.checkpoint, subgraph)

    def weights(mlps: Sequence[Mlp], is_down: bool, stacked: bool, prefix: str) -> dict[str, ir.Value]:
        groups = None
        if packed is not None:
            groups = packed.routed(mlps, is_down) if stacked else packed.shared(mlps[0], is_down)
        if groups is not None:
            values = packed_initializers(f"{prefix}_weight", groups, stacked, quantization.made)
        else:
            parts = [linears_of(mlp, is_down) for mlp in mlps]
            columns = [channels.columns(linears) for linears in parts]
            rows = [channels.rows(mlp, is_down) for mlp in mlps]
            values = quantization.initializers(
                f"{prefix}_weight", parts, stacked, columns=columns, row_orders=rows, residual=channels.count
            )
        return dict(zip(("weight", "scales", "tensor_scale"), values, strict=True))

    constants = expert_inputs(_OP, moe, name, weights, NVFP4, channels)
    given = largest_inputs(moe, context.amax)
    scale_search = context.recipe.scale_search if quantize_activations else 0
    for label, largest in zip(("input", "hidden"), given, strict=True):
        scale = torch.tensor(0.0)
        if quantize_activations and largest is not None:
            scale = tensor_scale(torch.tensor(largest), scale_search)
        constants[f"{label}_tensor_scale"] = initializer(f"{name}/{label}_tensor_scale", scale, ir.DataType.FLOAT)
    return replace_moe(
        context.graph,
        subgraph,
        _OP,
        constants,
        in_order(context, moe.x, channels, f"{name}/channels"),
        quantize_activations=int(quantize_activations),
        scale_search=scale_search,
        residual_channels=channels.count,
        static_scales=int(quantize_activations and None not in given),
    )
