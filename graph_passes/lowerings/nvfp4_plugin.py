"""Lowers a subgraph to one plugin node with NVFP4 weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import flatten, register
from trt_nvfp4.graph_passes.subgraphs.types import Block, Linear, Mlp, RMSNorm, Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, bias_vector, constant, initializer
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import packed_sources
from trt_nvfp4.graph_passes.weights.checkpoint_weights import packed_initializers
from trt_nvfp4.graph_passes.weights.mlp_inputs import linears_of, mlp_inputs
from trt_nvfp4.graph_passes.weights.quantization import Quantization
from trt_nvfp4.plugins.ops import DOMAIN, OPS, Activation
from trt_nvfp4.plugins.ops.definition import STATIC_SCALES
from trt_nvfp4.plugins.ops.number_formats import tensor_scale


def lower_nvfp4(
    graph: ir.Graph,
    subgraph: Subgraph,
    quantize_activations: bool,
    amax: Mapping[str, float],
    quantization: Quantization,
) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name; returns that name.

    `amax` holds largest magnitudes of activations by tensor name; without one, 4-bit ones are scaled at run time.
    `quantization` says how the weights are made.
    """
    inputs = _inputs(subgraph, amax if quantize_activations else {}, quantization)
    for value in inputs.values():
        if value.const_value is not None:
            register(graph, value)
    definition = OPS[subgraph.op]
    attributes = _attributes(subgraph, quantize_activations)
    attributes[STATIC_SCALES] = int(quantize_activations and amax.keys() >= set(subgraph.linear_inputs))
    attributes = definition.complete_attributes(**{k: v for k, v in attributes.items() if k in definition.attributes})
    node = ir.node(
        definition.name,
        [inputs[formal.name] for formal in definition.inputs],
        attributes,
        domain=DOMAIN,
        version=1,
        name=subgraph.name,
    )
    new_nodes = [node]
    first = subgraph.blocks[0].mlp if subgraph.blocks else None
    if first is not None and first.flattens:
        new_nodes.append(flatten(graph, node, subgraph.shapes["out_features"]))
    parts: Sequence[Block | Linear] = subgraph.blocks if subgraph.linear is None else [subgraph.linear]
    old_nodes = [node for part in parts for node in part.nodes]
    ir.convenience.replace_nodes_and_values(
        graph, old_nodes[-1], old_nodes, new_nodes, [parts[-1].y], [new_nodes[-1].outputs[0]]
    )
    return [subgraph.name]


def _inputs(subgraph: Subgraph, amax: Mapping[str, float], quantization: Quantization) -> dict[str, ir.Value]:
    """The op's inputs by name."""
    if subgraph.linear is not None:
        linear = subgraph.linear
        weight, scales, scale = _weights(f"{subgraph.name}/weight", [[linear]], False, quantization)
        bias = bias_vector([linear.bias], linear.weight.shape[0])
        return {
            "x": linear.x,
            "weight": weight,
            "weight_scales": scales,
            "weight_tensor_scale": scale,
            "bias": initializer(f"{subgraph.name}/bias", bias, linear.weight.dtype),
            "input_tensor_scale": _scales(subgraph, "input", [linear], amax, stacked=False),
        }
    stacked = subgraph.op == "NVFP4PersistentMLP"
    mlps = [block.mlp for block in subgraph.blocks]

    def weights(mlps: Sequence[Mlp], is_down: bool, stacked: bool, prefix: str) -> dict[str, ir.Value]:
        parts = [linears_of(mlp, is_down) for mlp in mlps]
        values = _weights(f"{prefix}_weight", parts, stacked, quantization)
        return dict(zip(("weight", "scales", "tensor_scale"), values, strict=True))

    inputs = {"x": subgraph.blocks[0].x}
    inputs |= mlp_inputs(mlps, f"{subgraph.name}/", stacked, weights, "up" if stacked else "gate_up")
    inputs["input_tensor_scale"] = _scales(subgraph, "input", [mlp.up for mlp in mlps], amax, stacked)
    inputs["hidden_tensor_scale"] = _scales(subgraph, "hidden", [mlp.down for mlp in mlps], amax, stacked)
    if stacked:
        features = subgraph.shapes["in_features"]
        rows = [_norm_weight(block.norm, features) for block in subgraph.blocks]
        inputs["norm_weight"] = initializer(f"{subgraph.name}/norm_weight", torch.stack(rows), mlps[0].up.weight.dtype)
    return inputs


def _weights(
    prefix: str, parts: Sequence[Sequence[Linear]], stacked: bool, quantization: Quantization
) -> tuple[ir.Value, ...]:
    """Values, block scales and tensor scale: from the checkpoint where it has all of them, else quantized."""
    groups = [quantization.checkpoint and packed_sources(quantization.checkpoint, linears) for linears in parts]
    known = [group for group in groups if group]
    if len(known) == len(groups):
        return packed_initializers(prefix, known, stacked, quantization.made)
    return quantization.initializers(prefix, parts, stacked)


def _attributes(subgraph: Subgraph, quantize_activations: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {"quantize_activations": int(quantize_activations)}
    if subgraph.blocks:
        block = subgraph.blocks[0]
        attributes |= {
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
    subgraph: Subgraph, name: str, linears: Sequence[Linear], amax: Mapping[str, float], stacked: bool
) -> ir.Value:
    """Tensor scales of the linears' inputs; 0, "compute at run time", where there is no statistic."""
    scales = [
        tensor_scale(torch.tensor(amax[x])) if (x := linear.observed) in amax else torch.tensor(0.0)
        for linear in linears
    ]
    return initializer(
        f"{subgraph.name}/{name}_tensor_scale", torch.stack(scales) if stacked else scales[0], ir.DataType.FLOAT
    )


def _norm_weight(norm: RMSNorm | None, features: int) -> torch.Tensor:
    if norm is None or norm.weight is None:
        return torch.ones(features)
    return as_torch(np.asarray(constant(norm.weight))).float().reshape(-1) + norm.offset
