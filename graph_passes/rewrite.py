"""Carries out a plan: the model with plugin nodes and quantized weights, written beside its external data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trt_nvfp4.calibration.statistics import Statistics
from trt_nvfp4.graph_passes.plan import Plan
from trt_nvfp4.graph_passes.source import SourceModel

# Called with (done, total, what) as tensors are written.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RewriteResult:
    """What was written: weight bytes of the whole model before and after, and per subgraph the names of its new nodes."""

    path: Path
    weights_bytes_before: int
    weights_bytes_after: int
    realized: dict[str, list[str]]


def calibration_tensors(plan: Plan, model: SourceModel) -> list[str]:
    """Names of the tensors of `model` whose statistics the plan can use."""
    raise NotImplementedError


def rewrite(
    model: SourceModel,
    plan: Plan,
    statistics: Statistics | None,
    out_path: str | Path,
    progress: Progress | None = None,
) -> RewriteResult:
    """Writes the planned model to `out_path` and its weights to `<out_path>.data`; neither appears before both are complete.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: a weight with NaN or Inf.
        OSError: the destination cannot be written.
    """
    raise NotImplementedError
