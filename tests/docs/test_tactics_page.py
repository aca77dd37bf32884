"""docs/figures/tactics.md lists every tactic of the plugins' C interface with its number, and says of linears what was
recorded."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "figures" / "tactics.md").read_text()


def test_tactics_and_their_numbers() -> None:
    header = (ROOT / "plugins" / "kernels" / "api" / "trt_nvfp4.h").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(re.findall(r"TRT_NVFP4_TACTIC_(\w+) = (\d+)", header))


def test_blocks_of_tokens_are_as_much_faster_than_generic_as_was_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "kernels" / "crossovers.json").read_text())
    runs = [
        {name: timing["median_us"] for name, timing in case["timings"].items()}
        for case in recorded["linear"]
        if case["m"] == 968
    ]
    wgmma, mma = (sorted(times["generic"] / times[name] for times in runs) for name in ("auto", "w4a16 by mma.sync"))
    assert len(runs) == 4
    claim = f"wgmma is {wgmma[0]:.0f} to {wgmma[-1]:.0f} times as fast as the generic kernel"
    assert f"{claim}, mma.sync {mma[0]:.1f} to {mma[-1]:.1f} times |" in PAGE


@pytest.mark.parametrize(("gpu", "file"), [("H200", "crossovers_small"), ("H100", "crossovers_small_h100")])
def test_small_linears_are_as_much_faster_as_was_recorded(gpu: str, file: str) -> None:
    section = PAGE.split("\n### Small linears\n")[1].split("\n### ")[0]
    outputs = [int(n) for n in re.findall(r"outputs up to (\d+)", section)]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d", line)]

    def taken(m: int, n: int, k: int) -> bool:
        row = next((row for row in rows if k <= int(row[0])), None)
        columns = zip(outputs, row[1:], strict=True) if row else ()
        return any(n <= most and m <= max(map(int, re.findall(r"\d+", tokens)), default=0) for most, tokens in columns)

    recorded = json.loads((ROOT / "benchmarks" / "results" / "kernels" / f"{file}.json").read_text())
    assert recorded["environment"]["gpu"].startswith(f"NVIDIA {gpu}")
    gains = []
    for case in recorded["small"]:
        times = {name: timing["median_us"] for name, timing in case["timings"].items()}
        others = [times[name] for name in ("w4a16 by mma.sync", "w4a16 of SM90") if name in times]
        if taken(case["m"], case["n"], case["k"]):
            gains.append(1 - times["auto"] / min(others))
    assert len(gains) > 80
    claim = f"{min(gains) * 100:.0f} to {max(gains) * 100:.0f} %"
    assert re.search(f"on an {gpu} it takes {claim} less time", " ".join(section.split()), re.IGNORECASE)
