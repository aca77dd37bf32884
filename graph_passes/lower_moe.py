"""Lowers an MoE block to one plugin node; the experts' weights are quantized one by one while they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.nvfp4_weights import nvfp4_initializers
from trt_nvfp4.graph_passes.packed_weights import PackedExperts, input_scale, packed_initializers
from trt_nvfp4.graph_passes.quantization import Quantization
from trt_nvfp4.graph_passes.source import OPS_DOMAIN
from trt_nvfp4.graph_passes.subgraph import Linear, Mlp, Moe, Subgraph
from trt_nvfp4.graph_passes.weights import Matrix, as_torch, bias_vector, constant, initializer
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.definition import STATIC_SCALES
from trt_nvfp4.plugins.ops.number_formats import tensor_scale
from trt_nvfp4.plugins.ops.nvfp4_moe import Scoring, no_shared_expert

_OP = OPS["NVFP4MoE"]


def lower_moe(
    graph: ir.Graph,
    subgraph: Subgraph,
    quantize_activations: bool,
    amax: Mapping[str, float],
    quantization: Quantization,
) -> list[str]:
    """Replaces the nodes of `subgraph`, a "moe", by one node of its name; returns that name.

    `amax` holds largest magnitudes of activations by tensor name; without one, 4-bit ones are scaled at run time.
    `quantization` says how the weights are made.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    new_nodes = []
    logits = moe.logits
    if logits.dtype != ir.DataType.FLOAT:
        # Lossless, so that the choice stays the model's own.
        new_nodes.append(ir.node("Cast", [logits], {"to": int(ir.DataType.FLOAT)}, name=f"{name}/logits"))
        logits = new_nodes[-1].outputs[0]
    packed = None if quantization.checkpoint is None else PackedExperts.find(quantization.checkpoint, name)
    inputs = {"x": moe.x, "router_logits": logits} | _weights(moe, name, quantization, packed)
    static_scales = quantize_activations
    for label, is_down in (("input", False), ("hidden", True)):
        scale = torch.tensor(0.0)
        if quantize_activations:
            scale = _activation_scale([mlp.down if is_down else mlp.up for mlp in _mlps(moe)], amax)
            if not scale and packed is not None:
                scale = input_scale(packed.routed(moe.experts, is_down))
        static_scales = static_scales and bool(scale)
        inputs[f"{label}_tensor_scale"] = initializer(f"{name}/{label}_tensor_scale", scale, ir.DataType.FLOAT)
    for value in inputs.values():
        if value.const_value is not None:
            graph.register_initializer(value)
    node = ir.node(
        _OP.name,
        [inputs[formal.name] for formal in _OP.inputs],
        _OP.complete_attributes(
            **_attributes(moe),
            quantize_activations=int(quantize_activations),
            **{STATIC_SCALES: int(static_scales)},
        ),
        domain=OPS_DOMAIN,
        version=1,
        name=name,
    )
    new_nodes.append(node)
    if moe.y_like is not None:
        shape = ir.node("Shape", [moe.y_like], name=f"{name}/shape")
        new_nodes += [
            shape,
            ir.node("Reshape", [node.outputs[0], shape.outputs[0]], {"allowzero": 1}, name=f"{name}/reshape"),
        ]
    for new in new_nodes[:-1]:
        new.outputs[0].name = f"{new.name}/output"
    producer = moe.y.producer()
    assert producer is not None
    ir.convenience.replace_nodes_and_values(graph, producer, moe.nodes, new_nodes, [moe.y], [new_nodes[-1].outputs[0]])
    return [name]


def _mlps(moe: Moe) -> tuple[Mlp, ...]:
    return moe.experts if moe.shared is None else (*moe.experts, moe.shared)


def _weights(moe: Moe, name: str, quantization: Quantization, packed: PackedExperts | None) -> dict[str, ir.Value]:
    """The op's constant inputs."""
    first = moe.experts[0]
    dtype = first.up.weight.dtype
    features = first.up.weight.shape[1]
    bias = moe.routing.correction_bias
    values = torch.zeros(len(moe.experts)) if bias is None else as_torch(constant(bias)).float().reshape(-1)
    inputs = {"correction_bias": initializer(f"{name}/correction_bias", values, ir.DataType.FLOAT)}
    inputs |= _mlp_weights(moe.experts, f"{name}/", True, quantization, packed)
    if moe.shared is None:
        for key, shape in no_shared_expert(features, int(first.gate is not None)).items():
            formal = next(formal for formal in _OP.inputs if formal.name == key)
            kind = {"tensor(int8)": ir.DataType.INT8, "tensor(float)": ir.DataType.FLOAT}.get(formal.type, dtype)
            inputs[key] = initializer(f"{name}/{key}", torch.zeros([int(d or 0) for d in shape]), kind)
        return inputs
    shared = _mlp_weights([moe.shared], f"{name}/shared_", False, quantization, packed)
    inputs |= {f"shared_{key}": value for key, value in shared.items()}
    gate = torch.zeros(features)
    if moe.shared_gate is not None:
        gate = next(Matrix([moe.shared_gate.weight]).chunks()).reshape(-1)
    inputs["shared_gate"] = initializer(f"{name}/shared_gate", gate, dtype)
    return inputs


def _mlp_weights(
    mlps: Sequence[Mlp],
    prefix: str,
    stacked: bool,
    quantization: Quantization,
    packed: PackedExperts | None,
) -> dict[str, ir.Value]:
    """Packed weights, scales and biases of `mlps`, one matrix each for gate and up together and for down.

    `stacked` ones are the routed experts, otherwise there is the shared one; `packed` has them in NVFP4.
    """
    inputs: dict[str, ir.Value] = {}
    for key, parts in (("gate_up", [mlp.linears[:-1] for mlp in mlps]), ("down", [mlp.linears[-1:] for mlp in mlps])):
        groups = None
        if packed is not None:
            groups = packed.routed(mlps, key == "down") if stacked else packed.shared(mlps[0], key == "down")
        if groups is not None:
            weight, scales, scale = packed_initializers(f"{prefix}{key}_weight", groups, stacked)
        else:
            matrices = [Matrix([linear.weight for linear in linears]) for linears in parts]
            known = quantization.inputs(linears[0] for linears in parts)
            weight, scales, scale = nvfp4_initializers(
                f"{prefix}{key}_weight", matrices, stacked, quantization.recipe, known
            )
        inputs |= {f"{key}_weight": weight, f"{key}_scales": scales, f"{key}_tensor_scale": scale}
        rows = [bias_vector([linear.bias for linear in linears], linears[0].weight.shape[0]) for linears in parts]
        dtype = parts[0][0].weight.dtype
        inputs[f"{key}_bias"] = initializer(f"{prefix}{key}_bias", torch.stack(rows) if stacked else rows[0], dtype)
    return inputs


def _attributes(moe: Moe) -> dict[str, Any]:
    first = moe.experts[0]
    routing = dict(vars(moe.routing))
    del routing["correction_bias"]
    return routing | {
        "scoring": int(Scoring[moe.routing.scoring.upper()]),
        "renormalize": int(moe.routing.renormalize),
        "scale_input": int(moe.routing.scale_input),
        "activation": int(Activation[first.activation.upper()]),
        "gated": int(first.gate is not None),
        "alpha": first.alpha,
        "limit": first.limit,
        "shared": int(moe.shared is not None),
        "shared_gated": int(moe.shared_gate is not None),
    }


def _activation_scale(linears: Sequence[Linear], amax: Mapping[str, float]) -> torch.Tensor:
    """One tensor scale for what all of `linears` read; 0, "compute at run time", where there is no statistic."""
    known = [amax[linear.x.name or ""] for linear in linears if (linear.x.name or "") in amax]
    return tensor_scale(torch.tensor(max(known))) if known else torch.tensor(0.0)
