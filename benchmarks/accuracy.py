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
    "local-hessian+gptq+quantized-inputs",
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
    for name, recipe in parsed.items():
        seconds = 0.0
        for site in subject.sites:
            started = time.perf_counter()
            quantized = recipes.quantize_weight(weights[site.name], recipe, statistics[site.name])
            seconds += time.perf_counter() - started
            site.set_weight(nvfp4.dequantize(*quantized))
        w4a16 = subject.evaluate()
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


if __name__ == "__main__":
    main()
