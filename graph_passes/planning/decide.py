"""Decides, per subgraph, what computes it on the target, and says why."""

from collections.abc import Sequence

from trt_nvfp4.calibration import recipes
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import lowering_on
from trt_nvfp4.graph_passes.lowerings.residual_channels import residual_unsupported
from trt_nvfp4.graph_passes.patterns.edges import edge_subgraphs
from trt_nvfp4.graph_passes.planning.kinds.kind import Decided, PlanContext, PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import DEFAULT_KINDS, kind_of, select
from trt_nvfp4.graph_passes.planning.plan import PRECISIONS, Plan, PlannedSubgraph, facts
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.weights.awq_folding import find_foldings

MOE_LAYERS = ("plugin", "trt_moe")


def make_plan(
    model: SourceModel, subgraphs: Sequence[Subgraph], capabilities: Capabilities, options: PlanOptions | None = None
) -> Plan:
    """Decides on every subgraph.

    Raises:
        ValueError: an unknown precision, kind, recipe or MoE layer, or a pattern that is not a regular expression.
    """
    options = options or PlanOptions()
    recipe = recipes.parse(options.recipe)
    if options.precision not in PRECISIONS:
        raise ValueError(f"unknown precision '{options.precision}'; one of {', '.join(PRECISIONS)}")
    if options.moe not in MOE_LAYERS:
        raise ValueError(f"unknown MoE layer '{options.moe}'; one of {', '.join(MOE_LAYERS)}")
    kinds = DEFAULT_KINDS if options.kinds is None else options.kinds
    selection = select(kinds, options.include, options.exclude)
    edges = edge_subgraphs(model, subgraphs) if options.keeps_edges else {}
    context = PlanContext(options, capabilities, selection, {subgraph.name: subgraph for subgraph in subgraphs}, edges)
    decided: dict[str, Decided] = {}
    for subgraph in subgraphs:
        if subgraph.name not in decided:
            decided |= kind_of(subgraph).decide(subgraph, context)
    entries = []
    for subgraph in subgraphs:
        decision, reason = decided[subgraph.name]
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
    if recipe.residual:
        for subgraph, entry in zip(subgraphs, entries, strict=True):
            is_mixed = entry.decision == Decision.NVFP4_MIXED
            if not is_mixed and entry.decision != Decision.NVFP4_W4A4:
                continue
            unsupported = residual_unsupported(subgraph, recipe, options.checkpoint, is_mixed)
            if unsupported is not None:
                entry.reason += f"; no residual channels: {unsupported}"
    if recipe.awq:
        scaled = [part for part, entry in zip(subgraphs, entries, strict=True) if entry.lowering.weights == "nvfp4"]
        _, unsupported_channels = find_foldings(scaled)
        for entry in entries:
            for channels in unsupported_channels.get(entry.name, ()):
                entry.reason += f"; awq leaves its {channels}"
    return Plan(model.path.name, capabilities.target, options.precision, str(recipe), entries, model.activations)
