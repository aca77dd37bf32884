"""docs/figures/real_models.md is what its script writes from the recorded run, and every model is served."""

from __future__ import annotations

import pytest

from benchmarks.models.real_models import LEAST_EQUAL, MODELS, best_equal
from benchmarks.pages import real_models_page
from benchmarks.pages.records import load

RECORD = load(real_models_page.NAME)


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.real_models_page."""
    assert real_models_page.page() == real_models_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_results_equal_the_originals(name: str) -> None:
    entry = RECORD["models"][name]
    assert entry["package"] == MODELS[name].package
    assert best_equal(entry["variants"]) >= LEAST_EQUAL


def test_there_are_text_vision_and_embeddings() -> None:
    assert len(RECORD["models"]) >= 6
    assert {entry["task"] for entry in RECORD["models"].values()} == {"text", "pictures", "sentences"}
