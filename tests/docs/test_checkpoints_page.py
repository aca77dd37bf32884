"""The table of peak memory is that of the record, which is within the bounds that the page is for."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = ("weights_bytes", "largest_shard_bytes", "peak_bytes", "disk_bytes")


def test_memory() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "models" / "memory.json").read_text())["runs"].values()
    page = (ROOT / "docs" / "how_to" / "checkpoints.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    for run in runs:
        (row,) = (row for row in rows if row[0].startswith(f"{run['model']}, to "))
        sizes = [f"{run[key] / 1e9:.1f} GB" for key in KEYS]
        assert run["peak_bytes"] <= 1.3 * run["largest_shard_bytes"] + 3e9
        assert row[1:] == [*sizes, f"{run['seconds']} s"]
