"""docs/figures/real_models.md is what its script writes from the recorded run, and every model is served."""

from __future__ import annotations

import pytest

from benchmarks.models.real_models import LEAST_EQUAL, MODELS, best_equal
from benchmarks.pages import real_models_page
from benchmarks.pages.records import load

RECORD = load(real_models_page.NAME)
#: Equal results of every variant, at least.
FLOOR = 0.8


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.real_models_page."""
    assert real_models_page.page() == real_models_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_served(name: str) -> None:
    entry = RECORD["models"][name]
    assert entry["package"] == MODELS[name].package
    assert best_equal(entry["variants"]) >= LEAST_EQUAL
    assert all(variant["equal"] >= FLOOR for variant in entry["variants"].values())


def test_what_the_page_says_of_each_arithmetic() -> None:
    """All of FP8 and of what nvfp4 made FP8 passes, W4A4 nowhere, W4A16 in the MiniLMs."""
    passing: dict[str, set[str]] = {}
    for name, entry in RECORD["models"].items():
        for label in entry["variants"].keys() - {"bf16"}:
            (decision,) = entry["variants"][label]["decisions"]
            if entry["variants"][label]["equal"] >= LEAST_EQUAL:
                passing.setdefault(decision, set()).add(name)
        if entry["task"] == "text":
            assert entry["variants"]["nvfp4"]["decisions"] == {"fp8": 7}
    assert passing["fp8"] == set(RECORD["models"])
    assert passing["nvfp4_w4a16"] == {name for name in RECORD["models"] if "MiniLM" in name}
    assert "nvfp4_w4a4" not in passing


def test_there_are_text_vision_and_embeddings() -> None:
    assert len(RECORD["models"]) >= 6
    assert {entry["task"] for entry in RECORD["models"].values()} == {"text", "pictures", "sentences"}
