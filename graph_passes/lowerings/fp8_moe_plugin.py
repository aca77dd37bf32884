"""Lowers an MoE block to one FP8MoE node; the experts' weights are quantized one by one while they are written."""

from functools import partial

from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.lowerings.moe_node import expert_inputs, largest_inputs, replace_moe
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.weights.fp8 import activation_scales, mlp_weights
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.weight_format import E4M3

OP = "FP8MoE"


def unsupported_fp8_moe(subgraph: MoeSubgraph) -> Reason | None:
    """The Reason why `FP8MoE` cannot compute the subgraph, or None if it can."""
    return subgraph.unaligned_k(OP)


def slow_fp8_moe(subgraph: MoeSubgraph, capabilities: Capabilities) -> Reason | None:
    """The Reason where `FP8MoE` has only generic kernels for the subgraph, or None."""
    of = ""
    if not capabilities.fp8_plugins:
        of = capabilities.target
    elif subgraph.dtype == "float32":
        of = "float32 activations"
    elif not subgraph.shapes["gated"]:
        of = "experts without a gate"
    return Reason(ReasonCode.NO_KERNELS, f"{OP} has no kernels of its own for {of}") if of else None


def lower_fp8_moe(context: LoweringContext, subgraph: MoeSubgraph) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name; returns that name.

    Activations without known range are scaled at run time. Raises ModelError where a weight holds NaN or Inf.
    """
    moe, name = subgraph.moe, subgraph.name
    assert moe is not None
    constants = expert_inputs(OPS[OP], moe, name, partial(mlp_weights, context.made), E4M3)
    given = largest_inputs(moe, context.amax)
    constants |= activation_scales(name, given)
    return replace_moe(context.graph, subgraph, OPS[OP], constants, static_scales=int(None not in given))
