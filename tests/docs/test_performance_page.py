"""docs/figures/performance.md is what its script writes from the recorded runs, and README shows a table of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import performance_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "figures" / "performance.md").read_text()


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.performance_page."""
    assert performance_page.page() == PAGE


def test_readme_shows_the_first_table() -> None:
    rows = [row for row in PAGE.split("## Linears")[0].splitlines() if row.startswith("| ") and "%" in row]
    shown = (ROOT / "README.md").read_text().split("## Speed")[1].split("## Accuracy")[0]
    assert [row for row in shown.splitlines() if row.startswith("| ") and "%" in row] == rows[:5]
