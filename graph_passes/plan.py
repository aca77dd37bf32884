"""Decides, per subgraph, what computes it on the target, and says why."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trt_nvfp4.graph_passes.find import find_subgraphs
from trt_nvfp4.graph_passes.source import ModelError, SourceModel
from trt_nvfp4.graph_passes.subgraph import Subgraph

KINDS = ("gated_mlp", "mlp", "linear")
PRECISIONS = ("auto", "nvfp4", "fp8", "bf16")
DECISIONS = ("nvfp4_w4a4", "nvfp4_w4a16", "fp8", "bf16", "fp16", "keep")
# NVFP4 has one scale per 16 values along K.
BLOCK = 16


class PlanError(ModelError):
    """A plan that does not fit the model, or is no plan."""


@dataclass(frozen=True)
class Capabilities:
    """What a target can compute with. `target` is its name, for the reasons."""

    target: str
    nvfp4_w4a4: bool = False
    nvfp4_w4a16: bool = False
    fp8: bool = False
    bf16: bool = True


@dataclass
class PlannedSubgraph:
    """One entry of a plan; `decision` is one of `DECISIONS`, `op` the operator that will replace the nodes ("" if none)."""

    name: str
    kind: str
    decision: str
    reason: str
    op: str
    input: str
    output: str
    dtype: str
    activation: str
    shapes: dict[str, int]
    nodes: list[str]


@dataclass
class Plan:
    """What is to become of every subgraph found; `precision` is what was asked for, `target` for which GPU."""

    model: str
    target: str
    precision: str
    subgraphs: list[PlannedSubgraph] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML with a header that says what may be edited."""
        from trt_nvfp4.graph_passes.plan_file import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: unreadable, not YAML, or an entry that is incomplete or of the wrong type (line and subgraph named).
        """
        from trt_nvfp4.graph_passes.plan_file import load

        return load(Path(path))

    def check(self, model: SourceModel) -> list[Subgraph]:
        """Checks the plan against the model; returns the model's subgraphs in the plan's order.

        Raises:
            PlanError: an entry that names an unknown decision, a subgraph or node that is not there, the wrong kind, or
                a decision that the subgraph does not allow.
        """
        raise NotImplementedError


def make_plan(
    model: SourceModel,
    subgraphs: Sequence[Subgraph],
    capabilities: Capabilities,
    precision: str = "auto",
    kinds: Collection[str] = ("gated_mlp", "mlp"),
    include: str | None = None,
    exclude: str | None = None,
    calibrated: bool = False,
) -> Plan:
    """Decides on every subgraph.

    Args:
        precision: "auto" and "nvfp4" take NVFP4 where it can serve, then FP8, then 16 bits; "fp8" and "bf16" start there.
        kinds: those to replace; the rest is kept.
        include, exclude: regular expressions searched in the subgraph's name and its nodes' names.
        calibrated: activation statistics will be at hand, so 4-bit activations get calibrated scales.

    Raises:
        ValueError: an unknown precision or kind, or a pattern that is not a regular expression.
    """
    raise NotImplementedError
