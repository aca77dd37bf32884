"""docs/figures/float32.md is what its script writes from the recorded run, which holds what the page promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import mixed_precision_page

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "accuracy" / "mixed_precision.json").read_text())
NETWORKS = RECORD["networks"]


def test_page_is_up_to_date() -> None:
    """Otherwise: python -m benchmarks.pages.mixed_precision_page."""
    page = mixed_precision_page.page()
    assert page == (ROOT / "docs" / "figures" / "float32.md").read_text()


def test_families_of_the_record() -> None:
    names = {key.partition(",")[0] for key in NETWORKS}
    assert names >= {"minilm", "bert", "vit", "siglip", "t5", "whisper", "dit", "llama"}


@pytest.mark.parametrize("key", NETWORKS)
def test_no_generic_kernel_no_float32_product_and_the_error_of_bfloat16(key: str) -> None:
    found = NETWORKS[key]
    assert found["float32 export"] < 1e-5
    assert found["converters"]["ours, BF16"]["error"] < max(1.5 * found["Torch, BF16"], 0.01)
    assert {name.partition(":")[0] for name in found["nvfp4"]["kernels"]} == {"W4A4"}
    assert found["nvfp4"]["plugin_layers"] == sum(found["nvfp4"]["kernels"].values())
    assert not found["nvfp4"]["network"]["float32_products"]
