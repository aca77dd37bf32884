"""docs/vla.md shows what was recorded."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vla.md").read_text()


def test_tables_are_those_of_the_records() -> None:
    """Otherwise: python benchmarks/vla_page.py prints one, and performance_page.py writes the other."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "vla_page.py"))
    performance = runpy.run_path(str(ROOT / "benchmarks" / "performance_page.py"))
    assert script["actions_table"]() in PAGE
    assert performance["vla_table"]() in PAGE
