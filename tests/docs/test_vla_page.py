"""docs/how_to/vla.md shows what was recorded."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import performance_page, vla_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "vla.md").read_text()


def test_tables_are_those_of_the_records() -> None:
    """Otherwise: python -m benchmarks.pages.vla_page prints one, and performance_page.py writes the other."""
    assert vla_page.actions_table() in PAGE
    assert performance_page.vla_table() in PAGE
    assert vla_page.builds_table() in PAGE
    assert vla_page.parts_table("thor") in PAGE
