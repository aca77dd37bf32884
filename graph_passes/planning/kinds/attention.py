"""Attention over a cache: the plugin, in which type it caches, or TensorRT's own layers."""

from collections.abc import Mapping

from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT, Decided, KernelClass, Kind, PlanContext, Work
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.weights.published_caches import published_cache_scales

#: What computes it: auto is the plugin where it has kernels for tensor cores.
ATTENTIONS = ("auto", "plugin", "tensorrt")
KV_CACHES = ("auto", "fp16", "bf16", "fp8")
_TYPES = {"float16": "fp16", "bfloat16": "bf16"}
# The kernels multiply 16 dimensions of a head at a time.
_HEAD_STEP = 16
_TENSORRT = "TensorRT's own attention and cache update"
_PLUGIN = "attention plugin; reads only the filled part of the cache"


def generic_reason(dtype: str, head_dim: int) -> Reason | None:
    """Why only the plugin's generic kernels serve activations of `dtype` and heads of `head_dim`; None where those for
    tensor cores do."""
    if dtype == "float32":
        return Reason(ReasonCode.NO_KERNELS, "its activations are float32")
    if head_dim % _HEAD_STEP:
        text = f"its heads have {head_dim} dimensions, not a multiple of {_HEAD_STEP}"
        return Reason(ReasonCode.NO_KERNELS, text)
    return None


def check_kv_cache(attention: str, kv_cache: str, has_scales: bool) -> None:
    """Raises ValueError for FP8 caches that attention cannot have, or that nothing scales."""
    if kv_cache != "fp8":
        return
    if attention == "tensorrt":
        raise ValueError("--kv-cache fp8: TensorRT's own cache update takes no FP8; leave out --attention tensorrt")
    if not has_scales:
        raise ValueError(
            "--kv-cache fp8 scales keys and values by calibration data: add --calib-data FILE|DIR with samples, or "
            "give a checkpoint that holds their scales"
        )


class Attention(Kind):
    """Attention over a cache, which `--attention` and `--kv-cache` decide on."""

    subgraph = AttentionSubgraph
    selection = "always"
    has_weights = False
    caches_tokens = True

    def decide(self, subgraph: AttentionSubgraph, context: PlanContext) -> dict[str, Decided]:
        """Raises ValueError where the caches cannot have the type that `--kv-cache` names."""
        unselected = context.selection.unselected(subgraph)
        decided = (Decision.KEEP, unselected) if unselected is not None else self._decide(subgraph, context)
        return {subgraph.name: decided}

    def _decide(self, subgraph: AttentionSubgraph, context: PlanContext) -> Decided:
        """FP8 caches by default where the checkpoint has scales for them, else caches in the network's type."""
        kv_cache = context.options.kv_cache
        if subgraph.unsupported is not None:
            text = f"{_TENSORRT}: {subgraph.unsupported.text}"
            return Decision.KEEP, Reason(subgraph.unsupported.code, text)
        if kv_cache in ("fp16", "bf16") and _TYPES.get(subgraph.dtype) != kv_cache:
            raise ValueError(
                f"--kv-cache {kv_cache}: the caches of subgraph '{subgraph.name}' have the network's type, "
                f"{subgraph.dtype}; choose that or fp8, or export the model in another type"
            )
        published = published_cache_scales(subgraph) is not None
        check_kv_cache(context.options.attention, kv_cache, published or context.has_ranges(subgraph))
        if context.options.attention == "tensorrt":
            return Decision.KEEP, Reason(ReasonCode.PREFERRED, f"{_TENSORRT}, as requested")
        slow = generic_reason(subgraph.dtype, subgraph.shapes["head_dim"])
        if slow is not None and context.options.attention == "auto" and kv_cache != "fp8":
            return Decision.KEEP, Reason(slow.code, f"{_TENSORRT}: the plugin's kernels are slow here, {slow.text}")
        if published and kv_cache in ("auto", "fp8"):
            text = f"{_PLUGIN}; FP8 caches, the checkpoint's scales"
            return Decision.ATTENTION_FP8, Reason(ReasonCode.PREFERRED, text)
        if kv_cache == "fp8":
            text = f"{_PLUGIN}; FP8 caches, a calibrated scale per head"
            return Decision.ATTENTION_FP8, Reason(ReasonCode.PREFERRED, text)
        return Decision.ATTENTION, Reason(ReasonCode.PREFERRED, f"{_PLUGIN}; caches in {subgraph.dtype}")

    def choices(
        self, subgraph: AttentionSubgraph, planned: Decision, capabilities: Capabilities, precision: str, kv_cache: str
    ) -> list[Decision]:
        if kv_cache != "auto":
            return [planned]
        return [Decision.KEEP] if subgraph.unsupported is not None else [Decision.ATTENTION_FP8, Decision.ATTENTION]

    def kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        why = generic_reason(entry.dtype, entry.shapes["head_dim"])
        if why is not None:
            return KernelClass("generic", why.text, "plan keep, or export the model in 16 bits")
        return KernelClass("attention", "split over keys for few tokens, tensor cores for many")

    def work(
        self, shapes: Mapping[str, int], decision: Decision, tokens: int, dtype: str, residual: int = 0
    ) -> list[Work]:
        """One new token each of `tokens` sequences whose caches are full; keys and values are read once."""
        element, arithmetic = KEPT[dtype]
        seen = min(shapes["capacity"], shapes["window"] or shapes["capacity"])
        cached_element = LOWERINGS[decision].weight_bytes if decision == Decision.ATTENTION_FP8 else element
        assert cached_element is not None
        cached = 2 * shapes["kv_heads"] * shapes["head_dim"] * seen * cached_element
        activations = 2 * (shapes["heads"] + shapes["kv_heads"]) * shapes["head_dim"] * element
        operations = 4.0 * tokens * shapes["heads"] * shapes["head_dim"] * seen
        return [Work(tokens * (cached + activations), operations, arithmetic)]
