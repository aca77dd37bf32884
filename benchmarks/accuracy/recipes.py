"""Accuracy of every recipe on trained models: recipe x metric, W4A4 and W4A16, into results/accuracy/accuracy.json.

    python -m benchmarks.accuracy.recipes [--subjects llama qwen3_moe minilm] [--recipes max mse ...]

Weights come from the recipes as build-engine uses them; activations go through the kernels' own rounding. Rows that the
output already has are kept: an interrupted run goes on.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.quantizing import fold, input_statistics, quantize_weights, quantized_activations
from benchmarks.accuracy.subjects import SUBJECTS, Metrics, above
from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.replacing import replacing

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy" / "accuracy.json"
RECIPES = (
    "max",
    "four-over-six",
    "mse",
    "diagonal",
    "local-hessian",
    "mse+awq",
    "max+gptq",
    "mse+gptq",
    "local-hessian+gptq",
    "local-hessian+gptq+awq",
    "local-hessian+gptq+quantized-inputs",
    "mse+activation-four-over-six",
    "mse+activation-sweep",
    "local-hessian+gptq+activation-sweep",
    "local-hessian+gptq+awq+activation-sweep",
    "local-hessian+gptq+quantized-inputs+activation-sweep",
    "mse+activation-sweep+residual:32",
    "mse+activation-sweep+residual:64",
    "local-hessian+gptq+awq+activation-sweep+residual:32",
    "local-hessian+gptq+awq+activation-sweep+residual:64",
    "local-hessian+gptq+quantized-inputs+activation-sweep+residual:32",
    "local-hessian+gptq+quantized-inputs+activation-sweep+residual:64",
)


def measure(
    name: str, spellings: list[str], known: dict[str, Any], save: Callable[[], None], device: str = "cpu"
) -> None:
    """Adds to `known` the metrics of the original and of every recipe, and the seconds that quantizing took."""
    parsed = {spelling: recipes.parse(spelling) for spelling in spellings}
    subject = SUBJECTS[name](device)
    known["original"] = subject.evaluate()
    known["quantized_weights"] = sum(site.weight.numel() for site in subject.sites)
    needed = frozenset().union(*(recipe.needs | recipe.residual_needs for recipe in parsed.values()))
    statistics = input_statistics(subject, needed)
    if "activations alone (W16A4)" not in known:
        with quantized_activations(subject, statistics):
            known["activations alone (W16A4)"] = subject.evaluate()
    rows = known.setdefault("recipes", {})

    def quantize(recipe: recipes.Recipe, w4a4: bool) -> tuple[Metrics, float]:
        """Metrics, and seconds of one thread that scaling and rounding took."""
        subject = SUBJECTS[name](device)
        started = time.process_time()
        folded = fold(subject, recipe, statistics)
        quantize_weights(subject, recipe, folded)
        seconds = time.process_time() - started
        with quantized_activations(subject, folded, recipe.scale_search, recipe.residual) if w4a4 else nullcontext():
            return subject.evaluate(), seconds

    for spelling, recipe in parsed.items():
        unfolded = str(replace(recipe, awq=False))
        if spelling in rows:
            continue
        if recipe.awq and not subject.folds and unfolded in rows:
            rows[spelling] = rows[unfolded]
            continue
        # As the rewrite does: what concerns 4-bit activations stays out of W4A16.
        weights_only = recipe.for_16_bit_activations()
        known_w4a16 = rows.get(str(weights_only)) if weights_only != recipe else None
        w4a16 = known_w4a16["W4A16"] if known_w4a16 else quantize(weights_only, False)[0]
        w4a4, seconds = quantize(recipe, True)
        if recipe.for_weights() != recipe and str(recipe.for_weights()) in rows:  # the same weights, of one time
            seconds = rows[str(recipe.for_weights())]["seconds"]
        rows[spelling] = {"W4A16": w4a16, "W4A4": w4a4, "seconds": seconds}
        save()
        print(f"{name:10} {spelling:40} W4A16 {_shown(w4a16)}  W4A4 {_shown(w4a4)}  {seconds:.1f} s", flush=True)


def _shown(metrics: Metrics) -> str:
    return " ".join(f"{name} {value:.5f}" for name, value in metrics.items() if isinstance(value, float))


def table(results: dict[str, Any]) -> list[str]:
    """The recorded run as rows of Markdown: perplexity above the original's (KL in thousandths), or cosine."""
    header = "| recipe | llama W4A16 | W4A4 | qwen3_moe W4A16 | W4A4 | MiniLM W4A16 | W4A4 |"
    rows = [header, "|" + "---|" * 7]
    subjects = results["subjects"]
    for recipe in subjects["llama"]["recipes"]:
        if recipe not in RECIPES:  # a part that was removed since
            continue
        cells = []
        for name in ("llama", "qwen3_moe", "minilm"):
            for mode in ("W4A16", "W4A4"):
                found = subjects[name]["recipes"].get(recipe, {}).get(mode)
                if found is None:
                    cells.append("not run")
                elif "cosine" in found:
                    cells.append(f"{found['cosine']:.4f}")
                else:
                    difference = found["perplexity"] - subjects[name]["original"]["perplexity"]
                    cells.append(f"{difference:+.3f} ({found['kl'] * 1000:.1f})")
        rows.append(f"| `{recipe}` | " + " | ".join(cells) + " |")
    return rows


def smollm2_table(results: dict[str, Any]) -> list[str]:
    """The run of SmolLM2 as rows of Markdown: perplexity above the original's, and KL in thousandths with its error."""
    subject = results["subjects"]["smollm2"]
    rows = ["| recipe | perplexity W4A16 | KL | perplexity W4A4 | KL |", "|" + "---|" * 5]
    alone = {"W4A4": subject["activations alone (W16A4)"]}
    named = {f"`{recipe}`": found for recipe, found in subject["recipes"].items()}
    for label, found in ({"activations alone (W16A4)": alone} | named).items():
        cells = []
        for mode in ("W4A16", "W4A4"):
            if mode in found:
                difference, _ = above(found[mode], subject["original"])
                cells += [
                    f"{difference:+.2f}",
                    f"{found[mode]['kl'] * 1000:.1f} ± {found[mode]['kl_error'] * 1000:.1f}",
                ]
            else:
                cells += ["-", "-"]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


def library_tables(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The run against another library as rows of Markdown, ours / theirs: of the language models, whose perplexity is
    the difference and its standard error, and of MiniLM. What one side lacks is left out."""
    texts, embeddings = [], []
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        if "error" in ours or "error" in theirs:
            continue
        seconds = f"{ours['seconds']:.1f} / {theirs['seconds']:.1f}"
        pairs = [(ours[mode], theirs[mode]) for mode in ("W4A16", "W4A4")]
        if row["subject"] == "minilm":
            cells = [f"{a['cosine']:.4f} / {b['cosine']:.4f}" for a, b in pairs]
            cells.append(" / ".join(f"{side['same_top_10']:.3f}" for side in pairs[1]))
            embeddings.append("| " + " | ".join(("MiniLM", row["recipe"], *cells, seconds)) + " |")
        else:
            cells = ["{:+.3f} ± {:.3f}".format(*above(a, b)) for a, b in pairs]
            cells += [f"{a['kl'] * 1000:.1f} / {b['kl'] * 1000:.1f}" for a, b in pairs]
            texts.append("| " + " | ".join((row["subject"], row["recipe"], *cells, seconds)) + " |")
    return texts, embeddings


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["llama", "qwen3_moe", "minilm"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cpu", help="where the models run; times are those of a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"subjects": {}}
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text())
    results["machine"] = {"processor": platform.processor() or platform.machine(), "threads": 1}
    results["torch"] = torch.__version__

    def save() -> None:
        with replacing(arguments.output) as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n")

    for name in arguments.subjects:
        measure(name, arguments.recipes, results["subjects"].setdefault(name, {}), save, arguments.device)
    save()
    if {"llama", "qwen3_moe", "minilm"} <= set(results["subjects"]):
        print("\n".join(table(results)))


if __name__ == "__main__":
    main()
