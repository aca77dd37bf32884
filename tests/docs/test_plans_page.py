"""docs/plans.md lists the decisions and kinds that plans know, and the budgets that `--accuracy-budget` takes."""

from __future__ import annotations

import re
from pathlib import Path

from trt_nvfp4.builder.accuracy_budget import METRICS
from trt_nvfp4.graph_passes.plan import DECISIONS, KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


def _first_cells(header: str) -> list[str]:
    """The names in the first column of the table whose header begins so."""
    table = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0]
    return re.findall(r"`([^`]+)`", " ".join(line.split(" | ")[0] for line in table.splitlines()[2:]))


def test_decisions() -> None:
    assert sorted(_first_cells("decision")) == sorted(DECISIONS)


def test_kinds() -> None:
    assert sorted(_first_cells("kind")) == sorted(KINDS)


def test_budgets() -> None:
    assert _first_cells("budget") == [f"{metric}{relation}X" for metric, (relation, _, _) in METRICS.items()]
