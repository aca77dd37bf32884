"""Decoder layers: which of them are fused into one launch, and what that asks of their parts."""

from collections.abc import Mapping, Sequence

from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS
from trt_nvfp4.graph_passes.planning.kinds.attention import generic_reason
from trt_nvfp4.graph_passes.planning.kinds.kind import Decided, KernelClass, Kind, PlanContext
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph
from trt_nvfp4.graph_passes.subgraphs.decoder_layer import DecoderLayerSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

# plugins/kernels/api/attention/decoder_layers.cu: what one launch takes.
_HEAD_DIM, _STEP = 128, 32  # of several tokens; of one heads may be longer
_EXPERT_STEP = 256
_PARTS = (Decision.NVFP4_W4A16, Decision.ATTENTION, Decision.ATTENTION_FP8)
_SEPARATE = "its parts are computed one by one"


def _slow_reason(shapes: Mapping[str, int], dtype: str) -> Reason | None:
    """Why one launch cannot compute a layer, so that the plugin would run its parts one by one; None where it can."""
    if (why := generic_reason(dtype, shapes["head_dim"])) is not None:
        return why
    sizes = ("hidden_features", "intermediate_features")
    if "experts" in shapes:
        limits = {"head_dim": _HEAD_DIM, "hidden_features": 4096, "experts": 256, "top_k": 32}
        if over := [name for name, most in limits.items() if shapes[name] > most]:
            text = f"its mixture has {over[0]} {shapes[over[0]]}, and one launch takes {limits[over[0]]}"
            return Reason(ReasonCode.NO_KERNELS, text)
        if (size := shapes["intermediate_features"]) % _EXPERT_STEP:
            return Reason(ReasonCode.NO_KERNELS, f"its experts' {size} features are not a multiple of {_EXPERT_STEP}")
    if odd := [size for name in sizes if (size := shapes[name]) % _STEP]:
        return Reason(ReasonCode.NO_KERNELS, f"{odd[0]} features are not a multiple of {_STEP}")
    return None


def _launch_tokens(shapes: Mapping[str, int]) -> str:
    """How many new tokens one launch takes, in words."""
    return "up to 16 tokens" if shapes["head_dim"] <= _HEAD_DIM and "experts" not in shapes else "one token"


class DecoderLayer(Kind):
    """A decoder layer. Its parts are planned too, and computed one by one where it is kept."""

    subgraph = DecoderLayerSubgraph
    selection = "named"
    is_whole_layer = True
    unselected_in_reports = "hide"

    def decide(self, subgraph: DecoderLayerSubgraph, context: PlanContext) -> dict[str, Decided]:
        """Fixes the decisions of the layer's products too, where it is fused."""
        parts = [] if subgraph.layer is None else [context.subgraphs[name] for name in subgraph.layer.parts]
        if (unselected := context.selection.unselected(subgraph)) is not None:
            return {subgraph.name: (Decision.KEEP, unselected)}
        if (reason := _separate(subgraph, parts, context)) is not None:
            return {subgraph.name: (Decision.KEEP, Reason(reason.code, f"{_SEPARATE}: {reason.text}"))}
        tokens = _launch_tokens(subgraph.shapes)
        text = f"fused with the following identical layers into one launch ({tokens}; longer inputs run layer by layer)"
        decided = {subgraph.name: (Decision.DECODER, Reason(ReasonCode.PREFERRED, text))}
        why = f"W4A16, {subgraph.dtype} activations, as part of '{subgraph.name}'"
        for part in parts:
            if part.linears:
                decided[part.name] = (Decision.NVFP4_W4A16, Reason(ReasonCode.PREFERRED, why))
        return decided

    def kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        if (why := _slow_reason(entry.shapes, entry.dtype)) is not None:
            return KernelClass("parts", f"not fused: {why.text}")
        return KernelClass(
            "decoder", f"one launch for {_launch_tokens(entry.shapes)}, the kernels of its parts for more"
        )

    def conflict(
        self, entry: PlannedSubgraph, subgraph: DecoderLayerSubgraph, plan: Sequence[PlannedSubgraph]
    ) -> str | None:
        if entry.decision != Decision.DECODER:
            return None
        decisions = {other.name: other.decision for other in plan}
        assert subgraph.layer is not None
        for name in subgraph.layer.parts:
            if (decision := decisions.get(name, Decision.KEEP)) not in _PARTS:
                return f"its part '{name}' is planned as {decision}, and a fused layer takes {', '.join(_PARTS)}"
        return None

    def covered_by(self, entry: PlannedSubgraph, others: Sequence[PlannedSubgraph], require: str) -> bool:
        """Whether its parts have all their weights in the format."""
        parts = [part for part in others if part is not entry and set(part.nodes) <= set(entry.nodes)]
        return bool(parts) and all(
            part.kind == AttentionSubgraph.kind or part.lowering.meets(require) for part in parts
        )


def _separate(subgraph: DecoderLayerSubgraph, parts: Sequence[Subgraph], context: PlanContext) -> Reason | None:
    """The Reason why a selected layer is not fused; None where it is."""
    if subgraph.unsupported is not None:
        return subgraph.unsupported
    if context.options.precision not in ("auto", "nvfp4"):
        return Reason(ReasonCode.PREFERRED, f"fused layers have NVFP4 weights, not {context.options.precision}")
    if context.options.attention == "tensorrt":
        return Reason(ReasonCode.PREFERRED, "its attention is TensorRT's own, as requested")
    if (slow := _slow_reason(subgraph.shapes, subgraph.dtype)) is not None:
        return slow
    lowering = LOWERINGS[Decision.NVFP4_W4A16]
    for part in parts:
        if (unselected := context.selection.unselected_by_name(part)) is not None:
            return Reason(unselected.code, f"'{part.name}' is {unselected.text}")
        reason = lowering.unsupported_by(context.capabilities)
        if reason is None and part.linears:
            reason = part.unsupported or lowering.unsupported(part)
        if reason is not None:
            return Reason(reason.code, f"'{part.name}': {reason.text}")
    return None
