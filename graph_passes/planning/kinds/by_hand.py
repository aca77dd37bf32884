"""Plugin nodes that the model brought."""

from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.kinds.kind import Decided, Kind, PlanContext
from trt_nvfp4.graph_passes.subgraphs.by_hand import ByHandSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode


class ByHand(Kind):
    """Stays as it is, and counts for `--require`."""

    subgraph = ByHandSubgraph
    selection = "always"

    def decide(self, subgraph: ByHandSubgraph, context: PlanContext) -> dict[str, Decided]:
        return {subgraph.name: (Decision.BY_HAND, Reason(ReasonCode.BY_HAND, f"the model brought this {subgraph.op}"))}
