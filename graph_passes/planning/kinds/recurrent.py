"""Recurrences over states: the plugin, or the standard operator's own definition."""

from collections.abc import Mapping

from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT, Decided, KernelClass, Kind, PlanContext, Work
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.recurrent import RecurrentSubgraph

# Sizes of heads that the tensor cores' kernels take: multiples of 16 up to this.
_STEP, _LARGEST = 16, 256
_STATE_BYTES = 4
_PLUGIN = "recurrence plugin; reads and writes the state once a step"


class Recurrent(Kind):
    """A recurrence, whose state takes the place of a cache."""

    subgraph = RecurrentSubgraph
    selection = "always"
    has_weights = False

    def decide(self, subgraph: RecurrentSubgraph, context: PlanContext) -> dict[str, Decided]:
        unselected = context.selection.unselected(subgraph)
        if unselected is not None:
            text = f"{unselected.text}; token by token, as ONNX defines it"
            return {subgraph.name: (Decision.KEEP, Reason(unselected.code, text))}
        return {subgraph.name: (Decision.RECURRENT, Reason(ReasonCode.PREFERRED, _PLUGIN))}

    def choices(
        self, subgraph: RecurrentSubgraph, planned: Decision, capabilities: Capabilities, precision: str, kv_cache: str
    ) -> list[Decision]:
        return [planned]

    def kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        sizes = entry.shapes["key_dim"], entry.shapes["value_dim"]
        if any(size % _STEP or size > _LARGEST for size in sizes):
            why = f"heads of {sizes[0]} keys and {sizes[1]} values, not multiples of {_STEP} up to {_LARGEST}"
            return KernelClass("generic", why)
        return KernelClass("recurrent", "the state in registers for few tokens, chunks on tensor cores for many")

    def work(
        self, shapes: Mapping[str, int], decision: Decision, tokens: int, dtype: str, residual: int = 0
    ) -> list[Work]:
        """One new token each of `tokens` sequences: the state is read and written."""
        element, arithmetic = KEPT[dtype]
        state = shapes["heads"] * shapes["key_dim"] * shapes["value_dim"]
        heads = shapes["q_heads"] + shapes["heads"]
        activations = heads * (shapes["key_dim"] + shapes["value_dim"]) * element
        return [Work(tokens * (2.0 * _STATE_BYTES * state + activations), 6.0 * tokens * state, arithmetic)]
