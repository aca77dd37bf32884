"""One entry of a plan."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.lowerings.lowering import Lowering
from trt_nvfp4.graph_passes.lowerings.registry import lowering_of
from trt_nvfp4.graph_passes.subgraphs.reasons import ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass
class PlannedSubgraph:
    """One entry of a plan.

    `reason` says why it was decided, for people, `reason_code` for programs (None in plans from before there were
    codes). `op` is the operator that replaces the nodes ("" where none does), `linear_inputs` the tensors that its
    linears multiply, `line` the entry's line in the plan file (0 where it has none), `kernels` what serves it on the
    target and why (see `kernel_class`; "" before it is noted), `residual_channels` how many it has, where not as
    many as the plan's recipe says. The rest is as in `Subgraph`.
    """

    name: str
    kind: str
    decision: Decision
    reason: str
    op: str
    shapes: dict[str, int]
    activation: str
    dtype: str
    input: str
    output: str
    nodes: list[str]
    linear_inputs: list[str]
    reason_code: ReasonCode | None = None
    kernels: str = field(default="", compare=False)
    residual_channels: int | None = None
    line: int = 0

    def as_yaml(self) -> dict[str, Any]:
        """The entry as a plan file holds it."""
        entry = {
            key: getattr(self, key) for key in FILE_KEYS if key in ENTRY_KEYS or getattr(self, key) not in ("", None)
        }
        entry |= {key: str(entry[key]) for key in ("decision", "reason_code") if key in entry}
        return entry | {"reason": f"{self.decision}: {self.reason}"}

    @property
    def lowering(self) -> Lowering:
        """The lowering of its decision."""
        return lowering_of(self.decision, self.kind, self.op)

    def own(self, recipe: Recipe) -> Recipe:
        """The plan's `recipe`, with the entry's residual channels where it has some of its own."""
        return recipe if self.residual_channels is None else replace(recipe, residual=self.residual_channels)


OPTIONAL_KEYS = ("reason_code", "kernels", "residual_channels")
# What a plan file holds: all but where it was read from.
FILE_KEYS = tuple(f.name for f in fields(PlannedSubgraph) if f.name != "line")
ENTRY_KEYS = tuple(key for key in FILE_KEYS if key not in OPTIONAL_KEYS)


def has_ranges(subgraph: Subgraph | PlannedSubgraph, calibrated: bool | Collection[str]) -> bool:
    """Whether statistics are known of what the linears multiply, for `calibrated` as in `make_plan`."""
    return calibrated if isinstance(calibrated, bool) else set(subgraph.linear_inputs) <= set(calibrated)
