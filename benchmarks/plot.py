"""Draws the stack's results: python benchmarks/plot.py [results/decode.json] [out.svg]. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def main(source: Path, out: Path) -> None:
    result = json.loads(source.read_text())
    cases = result["stack"]
    tokens = [str(case["m"]) for case in cases]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in cases[0]["timings"]:
        axes.plot(tokens, [case["timings"][name]["median_us"] for case in cases], marker="o", label=name)
    ours = "nvfp4 persistent fp16"
    floor = cases[0]["bandwidth_fractions"][ours] * cases[0]["timings"][ours]["median_us"]
    axes.axhline(floor, color="gray", linestyle="--", label="weights read once")
    axes.set(xlabel="tokens", ylabel="microseconds", ylim=(0, None))
    axes.set_title(f"18 gated MLP layers, 2048/16384, {result['environment']['gpu']}")
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    defaults = [HERE / "results" / "decode.json", HERE / "results" / "decode.svg"]
    main(*given, *defaults[len(given) :])
