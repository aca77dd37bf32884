"""Decides which layers of a decoder become one launch, and what that asks of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.attention import generic_reason
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph

KIND = "decoder"
# plugins/kernels/api/attention/decoder_layers.cu: what one launch takes.
_HEAD_DIM, _STEP = 128, 32  # of several tokens; of one heads may be longer
_EXPERT_STEP = 256
_PARTS = (Decision.NVFP4_W4A16, Decision.ATTENTION, Decision.ATTENTION_FP8)


def slow_reason(subgraph: Subgraph | PlannedSubgraph) -> str | None:
    """Why no one launch serves a layer, so that NVFP4Decoder would run its parts one by one."""
    shapes = subgraph.shapes
    if (why := generic_reason(subgraph.dtype, shapes["head_dim"])) is not None:
        return why
    sizes = ("hidden_features", "intermediate_features")
    if "experts" in shapes:
        limits = {"head_dim": _HEAD_DIM, "hidden_features": 4096, "experts": 256, "top_k": 32}
        if over := [name for name, most in limits.items() if shapes[name] > most]:
            return f"its mixture has {over[0]} {shapes[over[0]]}, and one launch takes {limits[over[0]]}"
        if (size := shapes["intermediate_features"]) % _EXPERT_STEP:
            return f"its experts' {size} features are not a multiple of {_EXPERT_STEP}"
    if odd := [size for name in sizes if (size := shapes[name]) % _STEP]:
        return f"{odd[0]} features are not a multiple of {_STEP}"
    return None


def launch_tokens(shapes: Mapping[str, int]) -> str:
    """How many new tokens one launch takes, in words."""
    return "up to 16 tokens" if shapes["head_dim"] <= _HEAD_DIM and "experts" not in shapes else "one token"


def decide_layers(
    subgraphs: Sequence[Subgraph],
    why_not: Callable[[Subgraph], Reason | None],
    by_name: Callable[[Subgraph], Reason | None],
    capabilities: Capabilities,
    precision: str,
    attention: str,
) -> dict[str, tuple[Decision, Reason]]:
    """Decision and reason of every layer, and of the products in those that become part of one launch.

    `why_not` and `by_name` say why a subgraph is not selected, by kind and name or by name alone.
    """
    found: dict[str, tuple[Decision, Reason]] = {}
    by_subgraph = {subgraph.name: subgraph for subgraph in subgraphs}
    for subgraph in subgraphs:
        if subgraph.kind != KIND:
            continue
        reason = why_not(subgraph)
        if reason is None and subgraph.layer is None:
            reason = Reason(ReasonCode.NOT_REPLACEABLE, f"its parts one by one: {subgraph.refusal}")
        elif reason is None:
            assert subgraph.layer is not None
            parts = [by_subgraph[name] for name in subgraph.layer.parts]
            reason = _obstacle(subgraph, parts, by_name, capabilities, precision, attention)
        if reason is not None:
            found[subgraph.name] = Decision.KEEP, reason
            continue
        tokens = launch_tokens(subgraph.shapes)
        text = f"one launch for this layer and the equal ones behind it, {tokens}; more take its parts"
        found[subgraph.name] = Decision.DECODER, Reason(ReasonCode.PREFERRED, text)
        why = f"NVFP4 weights, {subgraph.dtype} activations: part of '{subgraph.name}'"
        for part in parts:
            if part.kind != ATTENTION:
                found[part.name] = Decision.NVFP4_W4A16, Reason(ReasonCode.PREFERRED, why)
    return found


def _obstacle(
    subgraph: Subgraph,
    parts: Sequence[Subgraph],
    by_name: Callable[[Subgraph], Reason | None],
    capabilities: Capabilities,
    precision: str,
    attention: str,
) -> Reason | None:
    if precision not in ("auto", "nvfp4"):
        return Reason(ReasonCode.PREFERRED, f"its parts one by one: its weights would be NVFP4, not {precision}")
    if attention == "native":
        return Reason(ReasonCode.PREFERRED, "its parts one by one: its attention is TensorRT's own, as asked for")
    if (slow := slow_reason(subgraph)) is not None:
        return Reason(ReasonCode.NO_KERNELS, f"its parts one by one: {slow}")
    lowering = LOWERINGS[Decision.NVFP4_W4A16]
    for part in parts:
        if (reason := by_name(part)) is not None:
            return Reason(reason.code, f"its parts one by one: '{part.name}' is {reason.text}")
        if part.caution is not None:
            return Reason(ReasonCode.FEEDS_A_CHOICE, f"its parts one by one: '{part.name}': {part.caution}")
        missing = lowering.missing_on(capabilities) or (None if part.kind == ATTENTION else lowering.unsupported(part))
        if missing is not None:
            return Reason(missing.code, f"its parts one by one: '{part.name}': {missing.text}")
    return None


def split_part(entry: PlannedSubgraph, subgraph: Subgraph, plan: Iterable[PlannedSubgraph]) -> str | None:
    """Why an entry whose decision is `decoder` cannot be: what a part of its layer was planned as instead."""
    decisions = {other.name: other.decision for other in plan}
    assert subgraph.layer is not None
    for name in subgraph.layer.parts:
        decision = decisions.get(name, Decision.KEEP)
        if decision not in _PARTS:
            return f"its part '{name}' is planned as {decision}"
    return None


def settle_layers(entries: Sequence[PlannedSubgraph], subgraphs: Iterable[Subgraph]) -> list[PlannedSubgraph]:
    """`entries` where layers with parts of another precision are computed part by part, and say so."""
    layers = {subgraph.name: subgraph for subgraph in subgraphs if subgraph.kind == KIND}
    settled = []
    for entry in entries:
        if entry.decision == Decision.DECODER and (why := split_part(entry, layers[entry.name], entries)) is not None:
            entry = replace(
                entry,
                decision=Decision.KEEP,
                op="",
                reason=f"its parts one by one: {why}",
                reason_code=ReasonCode.ACCURACY_BUDGET,
            )
        settled.append(entry)
    return settled
