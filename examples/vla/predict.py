"""Least times of a built policy's parts by the roofline, beside the 50 to 100 ms that a control loop leaves.

    python examples/vla/predict.py policy-thor

These are predictions: from the data sheet's bandwidth and arithmetic, and what W4A16 kernels must issue to decode
weights (docs/figures/roofline.md). They cover the planned products with weights that fast kernels serve, and leave out
attention itself, all else, and launches.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.pipeline.parts_build import REPORT
from trt_nvfp4.builder.roofline.predict import LIMITS, subgraph_cost

BUDGET_MS = (50, 100)
#: What the columns are, and the decision that each part's products are predicted for.
FORMATS = {"BF16": "bf16", "FP8": "fp8", "W4A16": "nvfp4_w4a16", "W4A4": "nvfp4_w4a4"}


@dataclass(frozen=True)
class Row:
    """A part: bytes of its weights, rows of its products, and milliseconds of all its runs by format."""

    part: str
    times: int
    before: int
    after: int
    rows: list[int]
    planned_ms: float
    milliseconds: Mapping[str, float]
    kernels: list[str]
    left_out: int


def rows_of(folder: Path) -> Iterator[Row]:
    """One row per part, in the order in which they run."""
    report = json.loads((folder / REPORT).read_text())
    limits = LIMITS[report["target"]]
    for part in Manifest.load(folder).parts:
        built: Mapping[str, Any] = report["parts"][part.name]
        predicted = built["predicted"].get("subgraphs", [])
        times = 1 if part.loop is None else part.loop.times
        formats = {name: decision for name, decision in FORMATS.items() if name != "W4A4" or "fp4" in limits.tflops}
        milliseconds = {
            name: times
            * sum(
                subgraph_cost(entry["kind"], entry["shapes"], decision, entry["tokens"], limits).seconds
                for entry in predicted
            )
            * 1e3
            for name, decision in formats.items()
        }
        planned = times * sum(entry["predicted_us"]["nvfp4"] for entry in predicted) / 1e3
        replaced = [entry for entry in built["subgraphs"] if entry["decision"] != "keep"]
        yield Row(
            part.name,
            times,
            built["weights_bytes"]["before"],
            built["weights_bytes"]["after"],
            sorted({entry["tokens"] for entry in predicted}),
            planned,
            milliseconds,
            sorted({entry["kernels"].partition(":")[0] for entry in replaced}),
            len(replaced) - sum(len(entry["names"]) for entry in predicted),
        )


def table(folder: Path) -> Table:
    rows = list(rows_of(folder))
    columns = list(rows[0].milliseconds)
    target = json.loads((folder / REPORT).read_text())["target"]
    shown = Table(
        title=f"{target}: predicted, not measured; ms of all runs; budget {BUDGET_MS[0]} to {BUDGET_MS[1]} ms",
        title_justify="left",
    )
    for heading in ("part", "runs", "MB before", "MB after", "rows", "kernels", "as planned", *columns):
        shown.add_column(heading, justify="left" if heading in ("part", "kernels") else "right")
    for row in rows:
        missing = f" ({row.left_out} generic, not counted)" if row.left_out else ""
        shown.add_row(
            row.part,
            str(row.times),
            f"{row.before / 1e6:.0f}",
            f"{row.after / 1e6:.0f}",
            ", ".join(map(str, row.rows)),
            ", ".join(row.kernels) + missing,
            f"{row.planned_ms:.2f}",
            *(f"{row.milliseconds[name]:.2f}" for name in columns),
        )
    sums = [sum(row.milliseconds[name] for row in rows) for name in columns]
    shown.add_row("sum", "", "", "", "", "", f"{sum(row.planned_ms for row in rows):.2f}", *(f"{s:.2f}" for s in sums))
    return shown


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    Console(width=160).print(table(arguments.parse_args().folder))
