"""Accuracy of every recipe on trained models: recipe x metric, W4A4 and W4A16, into results/accuracy.json.

    python benchmarks/accuracy.py [--subjects llama qwen3_moe minilm] [--recipes max mse ...]

Weights come from the recipes as build-engine uses them; activations go through the kernels' own rounding.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from subjects import SUBJECTS, Subject, input_statistics, quantized_activations

from trt_nvfp4.calibration import nvfp4, recipes

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy.json"
RECIPES = (
    "max",
    "four-over-six",
    "mse",
    "diagonal",
    "local-hessian",
    "max+gptq",
    "mse+gptq",
    "local-hessian+gptq",
    "local-hessian+gptq+activation-order",
    "max+gptq+quantized-inputs",
    "local-hessian+gptq+quantized-inputs",
    "local-hessian+gptq+activation-order+quantized-inputs",
)


def measure(subject: Subject, names: list[str]) -> dict[str, Any]:
    """The metrics of the original and of every recipe, and the seconds that quantizing took."""
    parsed = {name: recipes.parse(name) for name in names}
    original = subject.evaluate()
    statistics = input_statistics(subject, frozenset().union(*(recipe.needs for recipe in parsed.values())))
    weights = {site.name: site.weight.detach().clone() for site in subject.sites}
    rows = {}
    with quantized_activations(subject, statistics):
        activations_alone = subject.evaluate()

    def quantize(recipe: recipes.Recipe) -> float:
        """Quantizes every weight; returns seconds."""
        started = time.perf_counter()
        for site in subject.sites:
            site.set_weight(
                nvfp4.dequantize(*recipes.quantize_weight(weights[site.name], recipe, statistics[site.name]))
            )
        return time.perf_counter() - started

    for name, recipe in parsed.items():
        # As the rewrite does: what concerns 4-bit activations stays out of W4A16.
        seconds = quantize(recipe.for_16_bit_activations())
        w4a16 = subject.evaluate()
        if recipe != recipe.for_16_bit_activations():
            seconds = quantize(recipe)
        with quantized_activations(subject, statistics):
            w4a4 = subject.evaluate()
        rows[name] = {"W4A16": w4a16, "W4A4": w4a4, "seconds": seconds}
        print(f"{subject.name:10} {name:50} W4A16 {_shown(w4a16)}  W4A4 {_shown(w4a4)}  {seconds:.1f} s", flush=True)
    for site in subject.sites:
        site.set_weight(weights[site.name])
    return {
        "original": original,
        "activations alone (W16A4)": activations_alone,
        "quantized_weights": sum(weight.numel() for weight in weights.values()),
        "recipes": rows,
    }


def _shown(metrics: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.5f}" for name, value in metrics.items())


def table(results: dict[str, Any]) -> list[str]:
    """The recorded run as rows of Markdown: perplexity above the original's (KL in thousandths), and cosine."""
    header = "| recipe | llama W4A16 | W4A4 | qwen3_moe W4A16 | W4A4 | MiniLM W4A16 | W4A4 |"
    rows = [header, "|" + "---|" * 7]
    subjects = results["subjects"]
    for recipe in subjects["llama"]["recipes"]:
        cells = []
        for name in ("llama", "qwen3_moe", "minilm"):
            for mode in ("W4A16", "W4A4"):
                found = subjects[name]["recipes"][recipe][mode]
                if "cosine" in found:
                    cells.append(f"{found['cosine']:.4f}")
                else:
                    above = found["perplexity"] - subjects[name]["original"]["perplexity"]
                    cells.append(f"{above:+.3f} ({found['kl'] * 1000:.1f})")
        rows.append(f"| `{recipe}` | " + " | ".join(cells) + " |")
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "subjects": {name: measure(SUBJECTS[name](), arguments.recipes) for name in arguments.subjects},
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    if set(SUBJECTS) == set(arguments.subjects):
        print("\n".join(table(results)))


if __name__ == "__main__":
    main()
