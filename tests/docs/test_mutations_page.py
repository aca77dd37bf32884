"""docs/figures/mutations.md is what its script writes, and gives a reason for every survivor."""

from __future__ import annotations

import json

from benchmarks.pages import mutations_page


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.mutations_page."""
    assert mutations_page.page() == mutations_page.PAGE.read_text()


def test_every_survivor_has_a_reason() -> None:
    runs = json.loads(mutations_page.RECORD.read_text())
    for run in runs:
        assert run["tried"] == run["killed"] + len(run["survivors"])
        assert all(isinstance(survivor["equivalent"], bool) for survivor in run["survivors"])
        assert all(len(survivor["reason"]) > 20 and survivor["reason"].endswith(".") for survivor in run["survivors"])
