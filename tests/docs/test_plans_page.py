"""docs/how_to/plans.md lists the decisions and kinds that plans know, the budgets that `--accuracy-budget` takes, and
where FP8 takes over."""

import json
import re
from pathlib import Path

from trt_nvfp4.builder.accuracy.budget import METRICS
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.kinds.products import GatedMlp, Moe
from trt_nvfp4.graph_passes.planning.kinds.registry import SELECTABLE_KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "plans.md").read_text()


def _first_cells(header: str) -> list[str]:
    """The names in the first column of the table whose header begins so."""
    table = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0]
    return re.findall(r"`([^`]+)`", " ".join(line.split(" | ")[0] for line in table.splitlines()[2:]))


def test_decisions() -> None:
    assert sorted(_first_cells("decision")) == sorted(Decision)


def test_kinds() -> None:
    assert sorted(_first_cells("kind")) == sorted(SELECTABLE_KINDS)


def test_budgets() -> None:
    assert _first_cells("budget") == [f"{metric}{relation}X" for metric, (relation, _, _) in METRICS.items()]


def test_where_fp8_takes_over() -> None:
    """The numbers of tokens are graph_passes/planning/kinds/products.py's, the times those that were recorded."""
    section = PAGE.split("### W4A16 or FP8\n")[1].split("\n### ")[0]
    most = [GatedMlp().most_w4a16_tokens({}, calibrated) + 1 for calibrated in (True, False)]
    assert f"| MLP or linear layer | {most[0]} | {most[1]}; only where" in section
    few, all_of_them = (Moe().most_w4a16_tokens({"experts": 64, "top_k": k}, True) for k in (1, 64))
    claim = f"more than {few}, or more than {all_of_them} for each expert on average, whichever comes first"
    assert f"| {claim} | twice as many |" in section

    recorded = json.loads((ROOT / "benchmarks" / "results" / "kernels" / "nvfp4_or_fp8.json").read_text())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (header,) = (row[1:] for row in rows if row[0].startswith("W4A16 /"))
    named = {"gated MLP 1024/4096": (1024, 4096), "2048/8192": (2048, 8192), "4096/11008": (4096, 11008)}
    named |= {"Qwen3-30B-A3B's MoE block": "qwen3-30b-a3b", "Mixtral 8x7B's": "mixtral-8x7b"}
    for name, key in named.items():
        (cells,) = (row[1:] for row in rows if row[0] == name)
        for tokens, cell in zip(header, cells, strict=True):
            (run,) = (
                run
                for run in recorded["mlp"] + recorded["moe"]
                if key in (run.get("model"), (run.get("hidden"), run.get("intermediate")))
                and run["tokens"] == int(tokens)
            )
            assert cell == " / ".join(f"{timing['median_us']:.0f}" for timing in run["timings"].values())
