"""Decides what computes attention over a cache: the plugin, in which type it caches, or TensorRT's own layers."""

from __future__ import annotations

from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.published_caches import published_cache_scales

KIND = "attention"
#: Who computes it: auto is the plugin where it has kernels for tensor cores.
ATTENTIONS = ("auto", "plugin", "native")
KV_CACHES = ("auto", "fp16", "bf16", "fp8")
_TYPES = {"float16": "fp16", "bfloat16": "bf16"}
# The kernels multiply 16 dimensions of a head at a time.
_HEAD_STEP = 16
_NATIVE = "TensorRT's own attention and cache update"
_PLUGIN = "one plugin that reads the cached length alone"


def generic_reason(subgraph_dtype: str, head_dim: int) -> str | None:
    """Why only the plugin's generic kernels serve; None where those for tensor cores do."""
    if subgraph_dtype == "float32":
        return "its activations are float32"
    if head_dim % _HEAD_STEP:
        return f"its heads have {head_dim} dimensions, no multiple of {_HEAD_STEP}"
    return None


def decide_attention(subgraph: Subgraph, attention: str, kv_cache: str, calibrated: bool) -> tuple[Decision, Reason]:
    """Decision and reason, for `attention` of ATTENTIONS and `kv_cache` of KV_CACHES: auto is FP8 where the
    checkpoint has scales for it, else the network's type.

    Raises ValueError where the caches cannot have the type that was asked for.
    """
    if subgraph.refusal is not None:
        return Decision.KEEP, Reason(ReasonCode.NOT_REPLACEABLE, f"{_NATIVE}: {subgraph.refusal}")
    if kv_cache in ("fp16", "bf16") and _TYPES.get(subgraph.dtype) != kv_cache:
        raise ValueError(
            f"--kv-cache {kv_cache}: the caches of subgraph '{subgraph.name}' have the network's type, "
            f"{subgraph.dtype}; choose that or fp8, or export the model in another type"
        )
    if attention == "native":
        if kv_cache == "fp8":
            raise ValueError("--kv-cache fp8: TensorRT's own cache update takes no FP8; leave out --attention native")
        return Decision.KEEP, Reason(ReasonCode.PREFERRED, f"{_NATIVE}, as asked for")
    slow = generic_reason(subgraph.dtype, subgraph.shapes["head_dim"])
    published = published_cache_scales(subgraph) is not None
    if slow is not None and attention == "auto" and kv_cache != "fp8":
        why = f"{_NATIVE}: the plugin's kernels are slow here, {slow}"
        return Decision.KEEP, Reason(ReasonCode.NO_KERNELS, why)
    if published and kv_cache in ("auto", "fp8"):
        return Decision.ATTENTION_FP8, Reason(ReasonCode.PREFERRED, f"{_PLUGIN}; FP8 caches, the checkpoint's scales")
    if kv_cache == "fp8":
        if not calibrated:
            raise ValueError(
                "--kv-cache fp8 scales keys and values by calibration data: add --calib-data FILE|DIR with samples, or "
                "give a checkpoint that holds their scales"
            )
        why = f"{_PLUGIN}; FP8 caches, a calibrated scale per head"
        return Decision.ATTENTION_FP8, Reason(ReasonCode.PREFERRED, why)
    return Decision.ATTENTION, Reason(ReasonCode.PREFERRED, f"{_PLUGIN}; caches in {subgraph.dtype}")
