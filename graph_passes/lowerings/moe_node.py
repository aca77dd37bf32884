"""The node that replaces an MoE block, whatever the format of the experts' weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import register
from trt_nvfp4.graph_passes.lowerings.residual_channels import NO_RESIDUAL, ResidualChannels
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Moe
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.values import Matrix, as_torch, constant, initializer
from trt_nvfp4.graph_passes.weights.mlp_inputs import MakeWeights, mlp_inputs
from trt_nvfp4.plugins.ops import DOMAIN, Activation, OpDefinition
from trt_nvfp4.plugins.ops.moe_routing import Scoring
from trt_nvfp4.plugins.ops.weight_format import WeightFormat


def expert_inputs(
    op: OpDefinition,
    moe: Moe,
    name: str,
    make: MakeWeights,
    fmt: WeightFormat,
    channels: ResidualChannels = NO_RESIDUAL,
) -> dict[str, ir.Value]:
    """The op's constant inputs but for the activations' scales."""
    first = moe.experts[0]
    dtype = first.up.weight.dtype
    features = first.up.weight.shape[1]
    bias = moe.routing.correction_bias
    values = torch.zeros(len(moe.experts)) if bias is None else as_torch(constant(bias)).float().reshape(-1)
    inputs = {"correction_bias": initializer(f"{name}/correction_bias", values, ir.DataType.FLOAT)}
    inputs |= mlp_inputs(moe.experts, f"{name}/", True, make, row_order=channels.rows)
    if moe.shared is None:
        types = {formal.name: formal.type for formal in op.inputs}
        for key, shape in fmt.smallest_shared_expert(features, first.gate is not None, channels.count).items():
            kind = {"tensor(int8)": ir.DataType.INT8, "tensor(float)": ir.DataType.FLOAT}.get(types[key], dtype)
            inputs[key] = initializer(f"{name}/{key}", torch.zeros([int(d or 0) for d in shape]), kind)
        return inputs
    shared = mlp_inputs([moe.shared], f"{name}/shared_", False, make, row_order=channels.rows)
    inputs |= {f"shared_{key}": value for key, value in shared.items()}
    gate = torch.zeros(features)
    if moe.shared_gate is not None:
        gate = next(Matrix([moe.shared_gate.weight], columns=channels.input).chunks()).reshape(-1)
    inputs["shared_gate"] = initializer(f"{name}/shared_gate", gate, dtype)
    return inputs


def largest_inputs(moe: Moe, amax: Mapping[str, float]) -> tuple[float | None, float | None]:
    """The largest magnitudes of what all experts read and of their hidden activations; None where none is known."""
    mlps = moe.experts if moe.shared is None else (*moe.experts, moe.shared)

    def largest(linears: Sequence[Linear]) -> float | None:
        return max((amax[name] for linear in linears if (name := linear.observed) in amax), default=None)

    return largest([mlp.up for mlp in mlps]), largest([mlp.down for mlp in mlps])


def replace_moe(
    graph: ir.Graph,
    subgraph: MoeSubgraph,
    op: OpDefinition,
    constants: Mapping[str, ir.Value],
    before: Sequence[ir.Node] = (),
    **attributes: int,
) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of `op` and of its name; returns that name.

    `before`: what comes in front of it, the last of which makes what the experts read; `attributes` are those that say
    how to compute; the others are the block's.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    new_nodes = list(before)

    def cast(value: ir.Value, dtype: ir.DataType, role: str) -> ir.Value:
        """Lossless, so that the choice stays the model's own."""
        if value.dtype == dtype:
            return value
        new_nodes.append(ir.node("Cast", [value], {"to": int(dtype)}, name=f"{name}/{role}"))
        return new_nodes[-1].outputs[0]

    if moe.routing.given is None:
        logits = cast(moe.logits, ir.DataType.FLOAT, "logits")
    else:
        chosen = cast(moe.routing.given[0], ir.DataType.INT64, "experts")
        weights = cast(moe.routing.given[1], ir.DataType.FLOAT, "weights")
        if len(moe.experts) < moe.router.weight.shape[0]:  # a rank's experts, of which a token may have chosen none
            zero = ir.node("Constant", [], {"value": ir.tensor(0.0, ir.DataType.FLOAT)}, name=f"{name}/zero")
            lowest = ir.node("Constant", [], {"value": ir.tensor(-np.inf, ir.DataType.FLOAT)}, name=f"{name}/lowest")
            unchosen = ir.node("Equal", [weights, zero.outputs[0]], name=f"{name}/unchosen")
            kept = ir.node("Where", [unchosen.outputs[0], lowest.outputs[0], weights], name=f"{name}/chosen_weights")
            new_nodes += [zero, lowest, unchosen, kept]
            weights = kept.outputs[0]
        shape = ir.node("Shape", [moe.logits], name=f"{name}/logits_shape")
        others = ir.node(
            "ConstantOfShape", shape.outputs, {"value": ir.tensor([-np.inf], ir.DataType.FLOAT)}, name=f"{name}/others"
        )
        new_nodes += [shape, others]
        scatter = [others.outputs[0], chosen, weights]
        new_nodes.append(ir.node("ScatterElements", scatter, {"axis": -1}, name=f"{name}/logits"))
        logits = new_nodes[-1].outputs[0]
    for value in constants.values():
        register(graph, value)
    inputs = {"x": before[-1].outputs[0] if before else moe.x, "router_logits": logits, **constants}
    node = ir.node(
        op.name,
        [inputs[formal.name] for formal in op.inputs],
        op.complete_attributes(**_attributes(moe), **attributes),
        domain=DOMAIN,
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


def _attributes(moe: Moe) -> dict[str, Any]:
    first = moe.experts[0]
    routing = {key: value for key, value in vars(moe.routing).items() if key not in ("correction_bias", "given")}
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
