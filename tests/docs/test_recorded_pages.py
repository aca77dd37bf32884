"""Pages of figures are what their scripts write from the recorded runs, which hold what the pages promise."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.models.real_models import LEAST_EQUAL, MODELS, best_equal
from benchmarks.pages import (
    diffusion_page,
    drafts_page,
    families_page,
    first_engine_page,
    mixed_precision_page,
    mutations_page,
    performance_page,
    real_models_page,
    roofline_page,
    vla_page,
)
from benchmarks.pages.records import load

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES: dict[str, ModuleType] = {
    "diffusion": diffusion_page,
    "drafts": drafts_page,
    "families": families_page,
    "first_engine": first_engine_page,
    "float32": mixed_precision_page,
    "mutations": mutations_page,
    "performance": performance_page,
    "real_models": real_models_page,
    "roofline": roofline_page,
}
FLOAT32: dict[str, Any] = json.loads((RESULTS / "accuracy" / "mixed_precision.json").read_text())["networks"]
REAL_MODELS = load(real_models_page.NAME)["models"]
#: Equal results of every variant, at least.
FLOOR = 0.8


def shown(name: str) -> str:
    return (ROOT / "docs" / "figures" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    """Otherwise: python -m with the name of its module."""
    assert PAGES[name].page() == shown(name)


def test_float32_networks_of_the_record() -> None:
    names = {key.partition(",")[0] for key in FLOAT32}
    assert names >= {"minilm", "bert", "vit", "siglip", "t5", "whisper", "dit", "llama"}


@pytest.mark.parametrize("key", FLOAT32)
def test_no_generic_kernel_no_float32_product_and_the_error_of_bfloat16(key: str) -> None:
    found = FLOAT32[key]
    assert found["float32 export"] < 1e-5
    assert found["converters"]["ours, BF16"]["error"] < max(1.5 * found["Torch, BF16"], 0.01)
    assert {name.partition(":")[0] for name in found["nvfp4"]["kernels"]} == {"W4A4"}
    assert found["nvfp4"]["plugin_layers"] == sum(found["nvfp4"]["kernels"].values())
    assert not found["nvfp4"]["network"]["float32_products"]


def test_every_surviving_mutation_has_a_reason() -> None:
    for run in json.loads(mutations_page.RECORD.read_text()):
        assert run["tried"] == run["killed"] + len(run["survivors"])
        assert all(isinstance(survivor["equivalent"], bool) for survivor in run["survivors"])
        assert all(len(survivor["reason"]) > 20 and survivor["reason"].endswith(".") for survivor in run["survivors"])


def test_readme_shows_the_first_table() -> None:
    rows = [row for row in shown("performance").split("## Linears")[0].splitlines() if row[:2] == "| " and "%" in row]
    readme = (ROOT / "README.md").read_text().split("## Speed")[1].split("## Accuracy")[0]
    assert [row for row in readme.splitlines() if row.startswith("| ") and "%" in row] == rows[:5]


@pytest.mark.parametrize("name", MODELS)
def test_every_real_model_is_served(name: str) -> None:
    entry = REAL_MODELS[name]
    assert entry["package"] == MODELS[name].package
    assert best_equal(entry["variants"]) >= LEAST_EQUAL
    assert all(variant["equal"] >= FLOOR for variant in entry["variants"].values())


def test_what_the_page_says_of_each_arithmetic() -> None:
    """All of FP8 and of what nvfp4 made FP8 passes, W4A4 nowhere, W4A16 in the MiniLMs."""
    passing: dict[str, set[str]] = {}
    for name, entry in REAL_MODELS.items():
        for label in entry["variants"].keys() - {"bf16"}:
            (decision,) = entry["variants"][label]["decisions"]
            if entry["variants"][label]["equal"] >= LEAST_EQUAL:
                passing.setdefault(decision, set()).add(name)
        if entry["task"] == "text":
            assert entry["variants"]["nvfp4"]["decisions"] == {"fp8": 7}
    assert passing["fp8"] == set(REAL_MODELS)
    assert passing["nvfp4_w4a16"] == {name for name in REAL_MODELS if "MiniLM" in name}
    assert "nvfp4_w4a4" not in passing
    assert len(REAL_MODELS) >= 6
    assert {entry["task"] for entry in REAL_MODELS.values()} == {"text", "pictures", "sentences"}


def test_the_roofline_is_a_prediction_that_nothing_beats() -> None:
    page = shown("roofline")
    assert '**All figures are predictions, but for the section "Against recorded runs".**' in page
    fractions = [int(found) for found in re.findall(r"(\d+)% of the roofline", page)]
    assert len(fractions) == 11
    assert all(5 < fraction < 100 for fraction in fractions), fractions
    # 18 layers of 3 x 2048 x 16384 weights of 0.5625 bytes: 1.019 GB, 3,733 us at 273 GB/s.
    assert "| 18 gated MLPs 2048/16384, M = 1 | 1,019 | 3.62 | 3,733 / 3,733 |" in page


def test_issue_and_memory_carry_the_recorded_times() -> None:
    """Half of the predictions are within 15 % of what was recorded, and few are far off."""
    kernels = re.findall(r"^\| (?:small|mma.sync|SM90), .*$", shown("roofline"), flags=re.MULTILINE)
    assert len(kernels) == 5
    for row in kernels:
        _, _, recorded, _, off, _, far, _ = (cell.strip() for cell in row.split("|"))
        assert int(off.rstrip("%")) <= 15
        assert int(far) <= 0.05 * int(recorded)


def test_tables_of_robot_policies() -> None:
    """Otherwise: python -m benchmarks.pages.vla_page prints one, and performance_page.py writes the other."""
    page = (ROOT / "docs" / "how_to" / "vla.md").read_text()
    for table in (vla_page.actions_table(), vla_page.builds_table(), vla_page.parts_table("thor")):
        assert table in page
    assert performance_page.vla_table() in page
    assert vla_page.policies_table() in (ROOT / "docs" / "how_to" / "robot_policies.md").read_text()


def test_peak_memory_of_checkpoints() -> None:
    """As recorded, and within the bounds that the page is for."""
    runs = json.loads((RESULTS / "models" / "memory.json").read_text())["runs"].values()
    page = (ROOT / "docs" / "how_to" / "checkpoints.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    for run in runs:
        (row,) = (row for row in rows if row[0].startswith(f"{run['model']}, to "))
        keys = ("weights_bytes", "largest_shard_bytes", "peak_bytes", "disk_bytes")
        assert run["peak_bytes"] <= 1.3 * run["largest_shard_bytes"] + 3e9
        assert row[1:] == [*(f"{run[key] / 1e9:.1f} GB" for key in keys), f"{run['seconds']} s"]


def test_each_class_generates_the_same_or_is_refused() -> None:
    outcomes = load(families_page.NAME)["outcomes"]
    assert {entry["how"] for entry in outcomes.values()} <= {"equal", "near tie", "refused"}
