"""Lowers an MoE block to one FP8MoE node; the experts' weights are quantized one by one while they are written."""

from __future__ import annotations

from functools import partial

from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.moe_node import expert_inputs, largest_inputs, replace_moe
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.fp8 import activation_scales, mlp_weights
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.weight_format import E4M3

OP = "FP8MoE"


def fp8_moe_obstacle(subgraph: Subgraph) -> Reason | None:
    """Why `FP8MoE` cannot compute the subgraph, a "moe"."""
    return subgraph.k_obstacle(OP)


def lower_fp8_moe(context: LoweringContext, subgraph: Subgraph) -> list[str]:
    """Replaces the nodes of `subgraph`, a "moe", by one node of its name; returns that name.

    Activations without known range are scaled at run time. Raises ModelError where a weight holds NaN or Inf.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    constants = expert_inputs(OPS[OP], moe, name, partial(mlp_weights, context.made), E4M3)
    given = largest_inputs(moe, context.amax)
    constants |= activation_scales(name, given)
    return replace_moe(context.graph, subgraph, OPS[OP], constants, static_scales=int(None not in given))
