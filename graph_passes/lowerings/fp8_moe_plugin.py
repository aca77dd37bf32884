"""Lowers an MoE block to one FP8MoE node; the experts' weights are quantized one by one while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir

from trt_nvfp4.graph_passes.lowerings.moe_node import expert_inputs, largest_inputs, replace_moe
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights
from trt_nvfp4.graph_passes.weights.fp8 import activation_scales, mlp_weights
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.weight_format import E4M3

OP = "FP8MoE"


def fp8_moe_obstacle(subgraph: Subgraph) -> str | None:
    """Why `FP8MoE` cannot compute the subgraph, a "moe"."""
    return subgraph.k_obstacle(OP)


def lower_fp8_moe(graph: ir.Graph, subgraph: Subgraph, amax: Mapping[str, float], made: MadeWeights) -> list[str]:
    """Replaces the nodes of `subgraph`, a "moe", by one node of its name; returns that name.

    `amax` holds largest magnitudes of activations by tensor name; those without one are scaled at run time.
    `made` collects weights, which blocks may share. Raises ModelError where a weight holds NaN or Inf.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    constants = expert_inputs(OPS[OP], moe, name, partial(mlp_weights, made), E4M3)
    given = largest_inputs(moe, amax)
    constants |= activation_scales(name, given)
    return replace_moe(graph, subgraph, OPS[OP], constants, static_scales=int(None not in given))
