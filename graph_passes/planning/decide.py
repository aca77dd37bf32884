"""Decides, per subgraph, what computes it on the target, and says why."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import lowering_on
from trt_nvfp4.graph_passes.lowerings.residual_channels import residual_obstacle
from trt_nvfp4.graph_passes.planning.attention import KIND as ATTENTION
from trt_nvfp4.graph_passes.planning.attention import decide_attention
from trt_nvfp4.graph_passes.planning.decoder import KIND as DECODER
from trt_nvfp4.graph_passes.planning.decoder import decide_layers
from trt_nvfp4.graph_passes.planning.plan import (
    BY_HAND,
    DEFAULT_KINDS,
    PRECISIONS,
    SELECTABLE_KINDS,
    Plan,
    PlannedSubgraph,
    facts,
)
from trt_nvfp4.graph_passes.planning.w4a16_tokens import MOST_W4A16_TOKENS, most_decode_tokens
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.awq_folding import find_foldings
from trt_nvfp4.graph_passes.weights.published_fp8 import is_published_in_fp8

MOE_LAYERS = ("plugin", "native")


def make_plan(
    model: SourceModel,
    subgraphs: Sequence[Subgraph],
    capabilities: Capabilities,
    precision: str = "auto",
    kinds: Collection[str] = DEFAULT_KINDS,
    include: str | None = None,
    exclude: str | None = None,
    calibrated: bool | Collection[str] = False,
    recipe: str = "max",
    moe: str = "plugin",
    tokens: Mapping[str, int] | None = None,
    attention: str = "auto",
    kv_cache: str = "auto",
    checkpoint: NVFP4Checkpoint | None = None,
) -> Plan:
    """Decides on every subgraph.

    Args:
        precision: "auto" and "nvfp4" take NVFP4 where it serves, then FP8, then 16 bits; "fp8" and "bf16" start there;
            "native-nvfp4" takes TensorRT's own NVFP4 layers instead of plugins.
        tokens: by subgraph name, the rows of its input at the typical shapes. Where they are many,
            "auto" takes FP8 first on a target without FP4, and W4A4 without calibration data on one with it.
        kinds: those to replace; the rest is kept, and so is what was put in by hand. The products in layers of kind
            "decoder" need not be named.
        include, exclude: regular expressions searched in the subgraph's name and its nodes' names.
        calibrated: activation statistics will be at hand, so that 4-bit activations get calibrated scales; or of which
            tensors.
        recipe: how NVFP4 weights are made.
        moe: "plugin", or "native": TensorRT's own MoE layer where target and block have it, else as for "plugin".
        attention, kv_cache: see `decide_attention`; `kinds` does not select attention.
        checkpoint: where weights will be taken from, byte by byte.

    Raises:
        ValueError: an unknown precision, kind, recipe or MoE layer, or a pattern that is not a regular expression.
    """
    recipe = str(recipes.parse(recipe))
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision '{precision}'; one of {', '.join(PRECISIONS)}")
    if moe not in MOE_LAYERS:
        raise ValueError(f"unknown MoE layer '{moe}'; one of {', '.join(MOE_LAYERS)}")
    why_not, by_name = selection(kinds, include, exclude), name_selection(include, exclude)
    layers = decide_layers(subgraphs, why_not, by_name, capabilities, precision, attention)
    entries = []
    for subgraph in subgraphs:
        is_attention = subgraph.kind == ATTENTION
        reason = by_name(subgraph) if is_attention else why_not(subgraph)
        decision = Decision.KEEP
        if subgraph.by_hand:
            decision = Decision.BY_HAND
            reason = Reason(ReasonCode.BY_HAND, f"the model brought this {subgraph.op}")
        elif subgraph.name in layers:
            decision, reason = layers[subgraph.name]
        elif reason is None and is_attention:
            ranges = has_ranges(subgraph, calibrated)
            decision, reason = decide_attention(subgraph, attention, kv_cache, ranges)
        elif reason is None:
            rows = 0 if tokens is None else tokens[subgraph.name]
            ranges = has_ranges(subgraph, calibrated)
            decision, reason = _decide(subgraph, capabilities, precision, ranges, moe, rows)
        elif (
            subgraph.refusal and not is_attention
        ):  # says more, for example that a router is behind which no block was recognised
            reason = Reason(ReasonCode.NOT_REPLACEABLE, subgraph.refusal)
        elif subgraph.caution and not is_attention:
            reason = Reason(ReasonCode.FEEDS_A_CHOICE, subgraph.caution)
        entries.append(
            PlannedSubgraph(
                name=subgraph.name,
                decision=decision,
                reason=reason.text,
                reason_code=reason.code,
                op=lowering_on(decision, subgraph, capabilities).op(subgraph),
                **facts(subgraph),
            )
        )
    if recipes.parse(recipe).residual:
        for subgraph, entry in zip(subgraphs, entries, strict=True):
            is_mixed = entry.decision == Decision.NVFP4_MIXED
            if not is_mixed and entry.decision != Decision.NVFP4_W4A4:
                continue
            obstacle = residual_obstacle(subgraph, recipes.parse(recipe), checkpoint, is_mixed)
            if obstacle is not None:
                entry.reason += f"; no residual channels: {obstacle}"
    if recipes.parse(recipe).awq:
        scaled = [part for part, entry in zip(subgraphs, entries, strict=True) if entry.lowering.weights == "nvfp4"]
        _, obstacles = find_foldings(scaled)
        for entry in entries:
            for obstacle in obstacles.get(entry.name, ()):
                entry.reason += f"; awq leaves its {obstacle}"
    return Plan(model.path.name, capabilities.target, precision, recipe, entries, model.activations)


def selection(
    kinds: Collection[str], include: str | None, exclude: str | None
) -> Callable[[Subgraph | PlannedSubgraph], Reason | None]:
    """What says why a subgraph is not among those to replace, None where it is; for the arguments see `make_plan`.

    Raises:
        ValueError: no kind, an unknown one, or a pattern that is not a regular expression.
    """
    unknown = sorted(set(kinds) - set(SELECTABLE_KINDS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], SELECTABLE_KINDS, 1)
        hint = f"did you mean '{near[0]}'? One" if near else "one"
        raise ValueError(f"unknown kind '{unknown[0]}'; {hint} of {', '.join(SELECTABLE_KINDS)}")
    if not kinds:
        raise ValueError(f"no kind of subgraph to replace; name some of {', '.join(SELECTABLE_KINDS)}")
    by_name = name_selection(include, exclude)

    def why_not(subgraph: Subgraph | PlannedSubgraph) -> Reason | None:
        if subgraph.kind not in (*kinds, BY_HAND):
            text = f"kind {subgraph.kind} is not among those to replace ({', '.join(kinds)})"
            return Reason(ReasonCode.KIND, text)
        return by_name(subgraph)

    return why_not


def name_selection(include: str | None, exclude: str | None) -> Callable[[Subgraph | PlannedSubgraph], Reason | None]:
    """The same by names alone."""
    included, excluded = _pattern("include", include), _pattern("exclude", exclude)

    def why_not(subgraph: Subgraph | PlannedSubgraph) -> Reason | None:
        names = (subgraph.name, *subgraph.nodes)
        if included is not None and not any(map(included.search, names)):
            return Reason(ReasonCode.NOT_INCLUDED, f"not matched by --include {include}")
        if excluded is not None and any(map(excluded.search, names)):
            return Reason(ReasonCode.EXCLUDED, f"matched by --exclude {exclude}")
        return None

    return why_not


def has_ranges(subgraph: Subgraph | PlannedSubgraph, calibrated: bool | Collection[str]) -> bool:
    """Whether statistics are known of what the linears multiply, for `calibrated` as in `make_plan`."""
    return calibrated if isinstance(calibrated, bool) else set(subgraph.linear_inputs) <= set(calibrated)


def _pattern(option: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--{option} {pattern}: not a regular expression: {error}") from error


class _Candidate(NamedTuple):
    """A decision, and why it would be taken."""

    decision: Decision
    why: str
    code: ReasonCode = ReasonCode.PREFERRED


def _decide(
    subgraph: Subgraph, capabilities: Capabilities, precision: str, calibrated: bool, moe: str, tokens: int
) -> tuple[Decision, Reason]:
    """The first of the candidates that target and subgraph allow, with what spoke against the ones before."""
    if subgraph.refusal is None and subgraph.caution is not None:
        text = f"{subgraph.caution}; a plan that is edited to another decision is followed"
        return Decision.KEEP, Reason(ReasonCode.FEEDS_A_CHOICE, text)
    against: list[Reason] = []
    candidates = _candidates(subgraph, capabilities, precision, calibrated, tokens)
    if subgraph.kind == "moe" and moe == "native":
        why = f"TensorRT's own MoE layer, experts in {subgraph.dtype}"
        candidates.insert(0, _Candidate(Decision.NATIVE, why))
    for decision, why, code in candidates:
        obstacle = _obstacle_on(subgraph, decision, capabilities)
        if obstacle is None:
            if against and code == ReasonCode.PREFERRED:
                code = against[0].code
            return decision, Reason(code, "; ".join([*dict.fromkeys(text for _, text in against), why]))
        against.append(obstacle)
    raise AssertionError("keep is always possible")


def allowed_decisions(subgraph: Subgraph, capabilities: Capabilities, precision: str) -> list[Decision]:
    """What target and subgraph allow under `precision`, with calibration data, in order of preference.

    "keep" is among them where it means 16 bits, and where nothing else is possible. A decoder's layer has the precision
    of its parts, and none of its own.
    """
    if subgraph.kind == DECODER:
        return []
    if subgraph.kind == ATTENTION:
        return [Decision.KEEP] if subgraph.refusal is not None else [Decision.ATTENTION_FP8, Decision.ATTENTION]
    if subgraph.caution is not None:
        return [Decision.KEEP]
    allowed = [
        candidate.decision
        for candidate in _candidates(subgraph, capabilities, precision, calibrated=True)
        if _obstacle_on(subgraph, candidate.decision, capabilities) is None
    ]
    return [decision for decision in allowed if decision != Decision.KEEP or Decision.BF16 not in allowed]


def _obstacle_on(subgraph: Subgraph, decision: Decision, capabilities: Capabilities) -> Reason | None:
    """Why the target cannot compute `subgraph` as `decision` says, or only slowly."""
    lowering = lowering_on(decision, subgraph, capabilities)
    return (
        lowering.missing_on(capabilities) or lowering.slow_on(subgraph, capabilities) or lowering.unsupported(subgraph)
    )


def _candidates(
    subgraph: Subgraph, capabilities: Capabilities, precision: str, calibrated: bool, tokens: int = 0
) -> list[_Candidate]:
    # Q/DQ nodes need scales, plugins find them.
    plugin = lowering_on(Decision.FP8, subgraph, capabilities).is_plugin
    uncalibrated = "activation scales computed at run time" if plugin else "weights only"
    scales = "calibrated activation scales" if calibrated else f"{uncalibrated}, for want of calibration data"
    candidates = []
    if precision == "auto" and subgraph.moe is None and is_published_in_fp8(subgraph):
        text = f"FP8, {scales}: the checkpoint holds its weights in FP8"
        candidates.append(_Candidate(Decision.FP8, text, ReasonCode.PUBLISHED_IN_FP8))
    most = most_decode_tokens(subgraph, calibrated)
    if precision == "auto" and not capabilities.nvfp4_w4a4 and (plugin or calibrated) and tokens > most:
        why = f"faster than NVFP4 weights with more than {most} tokens, and {tokens} are typical (--opt-shapes)"
        text = f"FP8, {scales}: {why}; --precision nvfp4 takes these"
        candidates.append(_Candidate(Decision.FP8, text, ReasonCode.FASTER_IN_FP8))
    if precision in ("auto", "nvfp4"):
        w4a16 = f"NVFP4 weights, {subgraph.dtype} activations"
        if calibrated:
            why = "NVFP4 weights and activations, with calibrated activation scales"
            candidates.append(_Candidate(Decision.NVFP4_W4A4, why))
            mixed = "NVFP4 weights; NVFP4 activations before gate and up, 16-bit ones before down"
            candidates += [_Candidate(Decision.NVFP4_MIXED, mixed), _Candidate(Decision.NVFP4_W4A16, w4a16)]
        else:
            run_time = "NVFP4 weights and activations, activation scales computed at run time"
            if precision == "auto" and subgraph.moe is None and tokens > MOST_W4A16_TOKENS:
                why = (
                    f"{run_time}: faster than 16-bit ones with more than {MOST_W4A16_TOKENS} tokens, and {tokens} are "
                    "typical (--opt-shapes); --precision nvfp4 takes these"
                )
                candidates.append(_Candidate(Decision.NVFP4_W4A4, why, ReasonCode.FASTER_IN_W4A4))
            why = f"{w4a16}, for want of calibration data to scale 4-bit ones by"
            candidates.append(_Candidate(Decision.NVFP4_W4A16, why, ReasonCode.NO_CALIBRATION))
            candidates.append(_Candidate(Decision.NVFP4_W4A4, run_time))
    if precision == "native-nvfp4":
        why = "TensorRT's own NVFP4 layers, with calibrated activation scales"
        candidates.append(_Candidate(Decision.NATIVE_NVFP4, why))
    if precision != "bf16":
        candidates.append(_Candidate(Decision.FP8, f"FP8, {scales}"))
    if subgraph.dtype == "float32":
        candidates.append(_Candidate(Decision.BF16, "BF16 instead of float32"))
    candidates.append(_Candidate(Decision.KEEP, f"stays {subgraph.dtype}"))
    return candidates
