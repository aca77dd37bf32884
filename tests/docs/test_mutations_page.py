"""docs/figures/mutations.md is what its script writes, and gives a reason for every survivor but one."""

from __future__ import annotations

import json

from benchmarks.pages import mutations_page


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.mutations_page."""
    assert mutations_page.page() == mutations_page.PAGE.read_text()


def test_every_survivor_but_one_has_a_reason() -> None:
    runs = json.loads(mutations_page.RECORD.read_text())
    reasons = [survivor["reason"] for run in runs for survivor in run["survivors"]]
    assert reasons.count(mutations_page.UNEXPLAINED) <= 1
    for run in runs:
        assert run["tried"] == run["killed"] + len(run["survivors"])
        assert all(survivor["reason"].endswith(".") for survivor in run["survivors"]), run["kernels"]
