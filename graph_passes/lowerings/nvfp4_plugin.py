"""Lowers MLPs and linears to one plugin node each, with NVFP4 weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import flatten, register, with_width
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.residual_channels import (
    NO_RESIDUAL,
    ResidualChannels,
    in_order,
    residual_channels,
)
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp
from trt_nvfp4.graph_passes.subgraphs.products import LinearSubgraph, MlpSubgraph, ProductSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason
from trt_nvfp4.graph_passes.subgraphs.values import bias_vector, initializer, norm_weight
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_sources, separate_scales
from trt_nvfp4.graph_passes.weights.checkpoint_weights import packed_initializers
from trt_nvfp4.graph_passes.weights.mlp_inputs import linears_of, mlp_inputs
from trt_nvfp4.graph_passes.weights.quantization import Quantization
from trt_nvfp4.plugins.ops import DOMAIN, OPS, Activation
from trt_nvfp4.plugins.ops.definition import RESIDUAL_CHANNELS, SCALE_SEARCH, STATIC_SCALES
from trt_nvfp4.plugins.ops.number_formats import tensor_scale

#: Kernels for tensor cores take K in steps of it.
K_STEP = 32
# Rows of K are filled to a multiple of it: of the steps of all kernels.
_FILLED = 128
# At most one zero to so many weights.
_FEW = 16


def filled(features: int) -> int:
    """An MLP's intermediate features as its plugin has them.

    The kernels for tensor cores take K in steps of 32. Other widths, such as SigLIP's 4304, are filled with zeros,
    which change no result. Small MLPs would need too many of them, and are not filled.
    """
    wide = -(-features // _FILLED) * _FILLED
    return features if features % K_STEP == 0 or _FEW * (wide - features) > features else wide


def unsupported_nvfp4(subgraph: ProductSubgraph) -> Reason | None:
    """The Reason why plugins with NVFP4 weights cannot compute the subgraph, or None if they can."""
    return subgraph.mixed_types or subgraph.unaligned_k("NVFP4")


def lower_nvfp4_linear(context: LoweringContext, subgraph: LinearSubgraph, quantize_activations: bool) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name, or by one for each of its linears where a checkpoint
    has these with tensor scales of their own; returns the names.

    4-bit activations without known range are scaled at run time.
    """
    channels = residual_channels(context, subgraph) if quantize_activations else NO_RESIDUAL
    return lower_linears(context, subgraph.name, subgraph.projections, quantize_activations, channels)


def lower_nvfp4_mlps(context: LoweringContext, subgraph: MlpSubgraph, quantize_activations: bool) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name; returns that name.

    4-bit activations without known range are scaled at run time.
    """
    graph = context.graph
    channels = residual_channels(context, subgraph) if quantize_activations else NO_RESIDUAL
    inputs = _inputs(subgraph, context.amax if quantize_activations else {}, context.quantization, channels)
    new_nodes = in_order(context, inputs["x"], channels, f"{subgraph.name}/channels")
    if new_nodes:
        inputs["x"] = new_nodes[0].outputs[0]
    attributes = _attributes(subgraph) | {RESIDUAL_CHANNELS: channels.count}
    node = _node(context, subgraph.op, subgraph.name, inputs, attributes, subgraph.linear_inputs, quantize_activations)
    new_nodes.append(node)
    if subgraph.blocks[0].mlp.flattens:
        new_nodes.append(flatten(graph, node, subgraph.shapes["out_features"]))
    old_nodes = [node for block in subgraph.blocks for node in block.nodes]
    ir.convenience.replace_nodes_and_values(
        graph, old_nodes[-1], old_nodes, new_nodes, [subgraph.blocks[-1].y], [new_nodes[-1].outputs[0]]
    )
    return [subgraph.name]


def lower_linears(
    context: LoweringContext,
    name: str,
    linears: tuple[Linear, ...],
    quantize_activations: bool,
    channels: ResidualChannels,
) -> list[str]:
    """Replaces `linears`, of one input, by one NVFP4Linear called `name`, or by one for each where a checkpoint has
    them with tensor scales of their own; returns the names."""
    amax = context.amax if quantize_activations else {}
    groups = separate_scales(context.quantization.checkpoint, linears)
    names = [name] if len(groups) == 1 else [f"{name}/{n}" for n in range(len(groups))]
    for own, group in zip(names, groups, strict=True):
        inputs = _linear_inputs(own, group, amax, context.quantization, channels)
        before = with_width(context.graph, inputs["x"], group[0].weight.shape[1], f"{own}/width")
        x = before[0].outputs[0] if before else inputs["x"]
        before += in_order(context, x, channels, f"{own}/channels")
        if before:
            inputs["x"] = before[-1].outputs[0]
        read = [linear.observed for linear in group]
        attributes = {RESIDUAL_CHANNELS: channels.count}
        node = _node(context, "NVFP4Linear", own, inputs, attributes, read, quantize_activations)
        _replace_linears(context.graph, before, node, group)
    return names


def _node(
    context: LoweringContext,
    op: str,
    name: str,
    inputs: Mapping[str, ir.Value],
    attributes: Mapping[str, Any],
    read: Sequence[str],
    quantize_activations: bool,
) -> ir.Node:
    """The plugin's node, whose products read the tensors `read`; constants among its inputs are registered."""
    for value in inputs.values():
        if value.const_value is not None:
            register(context.graph, value)
    definition = OPS[op]
    attributes = {
        **attributes,
        "quantize_activations": int(quantize_activations),
        STATIC_SCALES: int(quantize_activations and context.amax.keys() >= set(read)),
        SCALE_SEARCH: context.recipe.scale_search if quantize_activations else 0,
    }
    attributes = definition.complete_attributes(**{k: v for k, v in attributes.items() if k in definition.attributes})
    operands = [inputs[formal.name] for formal in definition.inputs]
    return ir.node(definition.name, operands, attributes, domain=DOMAIN, version=1, name=name)


def _replace_linears(graph: ir.Graph, before: Sequence[ir.Node], node: ir.Node, linears: Sequence[Linear]) -> None:
    """Puts `before` and `node` where the first of `linears` is, in graph order; a Split gives each its part of the
    output."""
    # Gate and up may be one product of the model.
    old_nodes = list(dict.fromkeys(node for linear in linears for node in linear.nodes))
    new_nodes, results = [*before, node], list(node.outputs)
    if len(linears) > 1:
        sizes = ir.tensor([linear.weight.shape[0] for linear in linears], ir.DataType.INT64, f"{node.name}/sizes")
        operand = ir.val(sizes.name, const_value=sizes)
        register(graph, operand)
        results[0].name, results[0].type = f"{node.name}/output", linears[0].y.type
        split = ir.node(
            "Split", [results[0], operand], {"axis": -1}, num_outputs=len(linears), name=f"{node.name}/split"
        )
        new_nodes, results = [*new_nodes, split], list(split.outputs)
    ir.convenience.replace_nodes_and_values(
        graph, old_nodes[0], old_nodes, new_nodes, [linear.y for linear in linears], results
    )


def _linear_inputs(
    name: str,
    linears: Sequence[Linear],
    amax: Mapping[str, float],
    quantization: Quantization,
    channels: ResidualChannels,
) -> dict[str, ir.Value]:
    """NVFP4Linear's inputs by name."""
    columns = [channels.columns(linears)]
    weight, scales, scale = _weights(
        f"{name}/weight", [linears], False, quantization, False, None, columns, residual=channels.count
    )
    bias = torch.cat([bias_vector([linear.bias], linear.weight.shape[0]) for linear in linears])
    return {
        "x": linears[0].x,
        "weight": weight,
        "weight_scales": scales,
        "weight_tensor_scale": scale,
        "bias": initializer(f"{name}/bias", bias, linears[0].weight.dtype),
        "input_tensor_scale": _scales(name, "input", linears[:1], amax, quantization, stacked=False),
    }


def _inputs(
    subgraph: MlpSubgraph, amax: Mapping[str, float], quantization: Quantization, channels: ResidualChannels
) -> dict[str, ir.Value]:
    """The op's inputs by name, of MLPs."""
    stacked = subgraph.op == "NVFP4PersistentMLP"
    mlps = subgraph.mlps
    features = subgraph.shapes["intermediate_features"]
    added = filled(features) - features

    def weights(mlps: Sequence[Mlp], is_down: bool, stacked: bool, prefix: str) -> dict[str, ir.Value]:
        parts = [linears_of(mlp, is_down) for mlp in mlps]
        rows, k = sum(linear.weight.shape[0] for linear in parts[0]), parts[0][0].weight.shape[1]
        size = (rows, k + added) if is_down else (rows + added * len(parts[0]), k)
        columns = [channels.columns(linears) for linears in parts]
        orders = [channels.rows(mlp, is_down) for mlp in mlps]
        values = _weights(
            f"{prefix}_weight",
            parts,
            stacked,
            quantization,
            True,
            size if added else None,
            columns,
            orders,
            channels.count,
        )
        return dict(zip(("weight", "scales", "tensor_scale"), values, strict=True))

    inputs = {"x": subgraph.blocks[0].x}
    up = "up" if stacked else "gate_up"
    inputs |= mlp_inputs(mlps, f"{subgraph.name}/", stacked, weights, up, added, channels.rows)
    for label, linears in (("input", [mlp.up for mlp in mlps]), ("hidden", [mlp.down for mlp in mlps])):
        inputs[f"{label}_tensor_scale"] = _scales(subgraph.name, label, linears, amax, quantization, stacked)
    if stacked:
        features = subgraph.shapes["in_features"]
        rows = [norm_weight(block.norm, features) for block in subgraph.blocks]
        inputs["norm_weight"] = initializer(f"{subgraph.name}/norm_weight", torch.stack(rows), mlps[0].up.weight.dtype)
    return inputs


def _weights(
    prefix: str,
    parts: Sequence[Sequence[Linear]],
    stacked: bool,
    quantization: Quantization,
    interleaved: bool,
    size: tuple[int, int] | None,
    columns: Sequence[torch.Tensor | None],
    row_orders: Sequence[torch.Tensor | None] | None = None,
    residual: int = 0,
) -> tuple[ir.Value, ...]:
    """Values, block scales and tensor scale: from the checkpoint where it has all of them, else quantized; for the rest
    see `Quantization.initializers`."""
    groups = [quantization.checkpoint and packed_sources(quantization.checkpoint, linears) for linears in parts]
    known = [group for group in groups if group]
    if len(known) == len(groups):
        return packed_initializers(prefix, known, stacked, quantization.made, interleaved, size)
    return quantization.initializers(
        prefix,
        parts,
        stacked,
        interleaved=interleaved,
        size=size,
        columns=columns,
        row_orders=row_orders,
        residual=residual,
    )


def _attributes(subgraph: MlpSubgraph) -> dict[str, Any]:
    """The attributes of an MLP's op that say what it computes."""
    block = subgraph.blocks[0]
    attributes: dict[str, Any] = {
        "activation": int(Activation[block.mlp.activation.upper()]),
        "alpha": block.mlp.alpha,
        "limit": block.mlp.limit,
        "gated": int(block.mlp.gate is not None),
        "norm": int(block.norm is not None),
        "residual": int(block.add is not None),
    }
    if block.norm is not None:
        attributes["epsilon"] = block.norm.epsilon
    return attributes


def _scales(
    prefix: str,
    name: str,
    linears: Sequence[Linear],
    amax: Mapping[str, float],
    quantization: Quantization,
    stacked: bool,
) -> ir.Value:
    """Tensor scales of the linears' inputs; 0, "compute at run time", without a statistic."""
    scales = [
        tensor_scale(torch.tensor(amax[x]), quantization.recipe.scale_search)
        if (x := linear.observed) in amax
        else torch.tensor(0.0)
        for linear in linears
    ]
    return initializer(
        f"{prefix}/{name}_tensor_scale", torch.stack(scales) if stacked else scales[0], ir.DataType.FLOAT
    )
