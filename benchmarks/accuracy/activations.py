"""What W4A4 loses in the activations, and what each remedy is worth by itself, into results/accuracy/activations.json.

    python -m benchmarks.accuracy.activations [--subjects llama qwen3_moe minilm] [--device cuda]

Without any weight quantized, and with the weights of one recipe. The plugins have no gate and up in 16 bits beside a
down in 4. Rows that the output already has are kept: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.quantizing import fold, input_statistics, quantize_weights, quantized_activations
from benchmarks.accuracy.residual_choice import residual_by_need
from benchmarks.accuracy.subjects import SUBJECTS
from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.replacing import replacing

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy" / "activations.json"
WEIGHTS = "local-hessian+gptq+awq"
# Arguments of `quantized_activations` by label; none: 16-bit activations.
REMEDIES: dict[str, dict[str, Any] | None] = {
    "16 bits": None,
    "amax": {},
    "four over six": {"scale_search": 1},
    "sweep": {"scale_search": 2},
    "amax, 32 residual channels": {"residual": 32},
    "amax, 64 residual channels": {"residual": 64},
    "sweep, 32 residual channels": {"scale_search": 2, "residual": 32},
    "sweep, 64 residual channels": {"scale_search": 2, "residual": 64},
    "sweep, 32 residual channels by need": {"scale_search": 2, "residual": "by need"},
    "sweep, down in 16 bits": {"scale_search": 2, "left": lambda site: site.is_down},
    "sweep, 32 residual channels, down in 16 bits": {
        "scale_search": 2,
        "residual": 32,
        "left": lambda site: site.is_down,
    },
    "sweep, 64 residual channels, down in 16 bits": {
        "scale_search": 2,
        "residual": 64,
        "left": lambda site: site.is_down,
    },
    "sweep, gate and up in 16 bits": {"scale_search": 2, "left": lambda site: site.is_up},
}


def measure(name: str, device: str, labels: list[str], known: dict[str, Any], save: Callable[[], None]) -> None:
    """Adds to `known` metrics by label: of the model's own weights under "W16", of WEIGHTS under "W4"."""
    recipe = recipes.parse(WEIGHTS)
    subject = SUBJECTS[name](device)
    known["original"] = subject.evaluate()
    statistics = input_statistics(subject, recipe.needs | replace(recipe, residual=64).residual_needs)
    by_need = [label for label in labels if (REMEDIES[label] or {}).get("residual") == "by need"]
    if by_need and "by_need" not in known:
        known["by_need"] = residual_by_need(subject, statistics, scale_search=2, mean=32)
    for weights in ("W16", "W4"):
        if weights == "W4":
            statistics = fold(subject, recipe, statistics)
        originals = {site.name: site.weight.clone() for site in subject.sites}
        made: dict[str, dict[str, torch.Tensor]] = {}
        rows = known.setdefault(weights, {})
        for label in labels:
            if label in rows:
                continue
            remedy = REMEDIES[label]
            if remedy is not None and label in by_need:
                remedy = remedy | {"residual": known["by_need"]}
            if weights == "W4":
                residual = (remedy or {}).get("residual", 0)
                for site in subject.sites:
                    site.set_weight(made.get(str(residual), originals)[site.name])
                if str(residual) not in made:
                    quantize_weights(subject, recipe, statistics, residual)
                    made[str(residual)] = {site.name: site.weight for site in subject.sites}
            with nullcontext() if remedy is None else quantized_activations(subject, statistics, **remedy):
                rows[label] = subject.evaluate()
            save()
            shown = " ".join(f"{key} {value:.5f}" for key, value in rows[label].items() if isinstance(value, float))
            print(f"{name:10} {weights:4} {label:32} {shown}", flush=True)


def table(results: dict[str, Any]) -> list[str]:
    """The recorded run as rows of Markdown, in thousandths with the standard error: KL, or 1 - cosine."""
    names = list(results["subjects"])
    header = " | ".join(f"{name} W16 | W4" for name in names)
    rows = [f"| activations | {header} |", "|" + "---|" * (1 + 2 * len(names))]
    for label in REMEDIES:
        cells = []
        for name in names:
            for weights in ("W16", "W4"):
                found = results["subjects"][name].get(weights, {}).get(label)
                if found is None:
                    cells.append("not run")
                elif "cosine" in found:
                    cells.append(f"{1000 - found['cosine'] * 1000:.1f} ± {found['cosine_error'] * 1000:.1f}")
                else:
                    cells.append(f"{found['kl'] * 1000:.1f} \u00b1 {found['kl_error'] * 1000:.1f}")
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["llama", "qwen3_moe", "minilm"])
    parser.add_argument("--labels", nargs="+", choices=REMEDIES, default=list(REMEDIES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"subjects": {}}
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text())
    results["weights"] = WEIGHTS

    def save() -> None:
        with replacing(arguments.output) as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n")

    for name in arguments.subjects:
        known = results["subjects"].setdefault(name, {})
        measure(name, arguments.device, arguments.labels, known, save)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
