"""Draws the stack's results, as decode.py wrote them. Needs matplotlib."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        default=HERE / "results" / "kernels" / "decode.json",
        help="a result of decode.py",
    )
    parser.add_argument(
        "out", type=Path, nargs="?", default=HERE / "results" / "kernels" / "decode.svg", help="the chart"
    )
    arguments = parser.parse_args()
    result = json.loads(arguments.source.read_text())
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
    figure.savefig(arguments.out, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
