"""Plugin nodes that the model brought."""

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass(frozen=True, kw_only=True)
class ByHandSubgraph(Subgraph):
    """A plugin node that the model brought, of the operator `plugin`. `shapes` is empty."""

    kind = "by_hand"

    plugin: str

    @property
    def op(self) -> str:
        return self.plugin
