"""docs/figures/roofline.md is what its script writes, says that it predicts, and nobody beats it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pages import roofline_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "figures" / "roofline.md").read_text()


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.roofline_page."""
    assert roofline_page.page() == PAGE


def test_page_calls_itself_a_prediction() -> None:
    assert '**All figures are predictions, but for the section "Against recorded runs".**' in PAGE


def test_published_figures_stay_below_the_roofline() -> None:
    fractions = [int(found) for found in re.findall(r"(\d+)% of the roofline", PAGE)]
    assert len(fractions) == 11
    assert all(5 < fraction < 100 for fraction in fractions), fractions


def test_reference_stack_by_hand() -> None:
    """18 layers of 3 x 2048 x 16384 weights of 0.5625 bytes: 1.019 GB, 3,733 us at 273 GB/s."""
    assert "| 18 gated MLPs 2048/16384, M = 1 | 1,019 | 3.62 | 3,733 / 3,733 |" in PAGE


def test_issue_and_memory_carry_the_recorded_times() -> None:
    """Half of the predictions are within 15 % of what was recorded, and few are far off."""
    kernels = re.findall(r"^\| (?:small|mma.sync|SM90), .*$", PAGE, flags=re.MULTILINE)
    assert len(kernels) == 5
    for row in kernels:
        _, _, recorded, _, off, _, far, _ = (cell.strip() for cell in row.split("|"))
        assert int(off.rstrip("%")) <= 15
        assert int(far) <= 0.05 * int(recorded)
