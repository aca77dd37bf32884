"""Lowers the gated MLPs of a subgraph to one FP8 plugin node each; norms and residuals around them stay."""

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import flatten, register
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.fp8_qdq import unsupported_fp8
from trt_nvfp4.graph_passes.subgraphs.parts import Mlp
from trt_nvfp4.graph_passes.subgraphs.products import GatedMlpSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights
from trt_nvfp4.graph_passes.weights.fp8 import activation_scales, mlp_weights
from trt_nvfp4.graph_passes.weights.mlp_inputs import mlp_inputs
from trt_nvfp4.plugins.ops import DOMAIN, OPS, Activation
from trt_nvfp4.plugins.ops.definition import STATIC_SCALES

OP = "FP8GatedMLP"


def unsupported_fp8_mlp(subgraph: GatedMlpSubgraph) -> Reason | None:
    """The Reason why `FP8GatedMLP` cannot compute the subgraph, or None if it can."""
    return unsupported_fp8(subgraph) or subgraph.mixed_types or subgraph.unaligned_k(OP)


def lower_fp8_mlp(context: LoweringContext, subgraph: GatedMlpSubgraph) -> list[str]:
    """Replaces each MLP by one node; returns their names: the subgraph's, numbered where there are several.

    Activations without known range are scaled at run time. Raises ModelError where a weight holds NaN or Inf.
    """
    mlps = subgraph.mlps
    names = [subgraph.name] if len(mlps) == 1 else [f"{subgraph.name}/{i}" for i in range(len(mlps))]
    # From the last to the first, so that no MLP is replaced before those that read its output.
    for name, mlp in reversed(list(zip(names, mlps, strict=True))):
        _lower(context.graph, name, mlp, context.amax, context.made)
    return names


def _lower(graph: ir.Graph, name: str, mlp: Mlp, amax: Mapping[str, float], made: MadeWeights) -> None:
    given = [amax.get(linear.observed) for linear in (mlp.up, mlp.down)]
    constants = mlp_inputs([mlp], f"{name}/", False, partial(mlp_weights, made)) | activation_scales(name, given)
    for value in constants.values():
        register(graph, value)
    attributes = OPS[OP].complete_attributes(
        activation=int(Activation[mlp.activation.upper()]),
        alpha=mlp.alpha,
        limit=mlp.limit,
        **{STATIC_SCALES: int(None not in given)},
    )
    nodes = [ir.node(OP, [mlp.x, *constants.values()], attributes, domain=DOMAIN, version=1, name=name)]
    if mlp.flattens:
        nodes.append(flatten(graph, nodes[0], mlp.down.weight.shape[0]))
    ir.convenience.replace_nodes_and_values(graph, mlp.nodes[-1], mlp.nodes, nodes, [mlp.y], [nodes[-1].outputs[0]])
