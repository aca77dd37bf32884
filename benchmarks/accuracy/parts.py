"""What each part of a recipe is worth by itself and what it costs, from the recorded runs; printed as Markdown.

    python -m benchmarks.accuracy.parts

Losses are W4A4's: KL of the language models, 1 - cosine of MiniLM.
"""

import json
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.roofline.predict import LIMITS, subgraph_cost
from trt_nvfp4.graph_passes.lowerings.decision import Decision

RESULTS = Path(__file__).resolve().parents[1] / "results"
SUBJECTS = ("llama", "qwen3_moe", "minilm")

# Of weights, by recipe: part, with it, without it.
WEIGHTS = (
    ("`four-over-six`", "four-over-six", "max"),
    ("`mse`", "mse", "max"),
    ("`diagonal`", "diagonal", "mse"),
    ("`local-hessian`", "local-hessian", "mse"),
    ("`awq`", "mse+awq", "mse"),
    ("`gptq`", "mse+gptq", "mse"),
    ("`local-hessian`", "local-hessian+gptq", "mse+gptq"),
    ("`awq`", "local-hessian+gptq+awq", "local-hessian+gptq"),
    ("`quantized-inputs`", "local-hessian+gptq+quantized-inputs", "local-hessian+gptq"),
)
# Remedies for activations, by the labels of activations.json, with the weights of one recipe.
ACTIVATIONS = (
    ("`activation-four-over-six`", "four over six", "amax"),
    ("`activation-sweep`", "sweep", "amax"),
    ("`residual:32`", "amax, 32 residual channels", "amax"),
    ("`residual:64`", "amax, 64 residual channels", "amax"),
    ("`residual:32`", "sweep, 32 residual channels", "sweep"),
    ("`residual:64`", "sweep, 64 residual channels", "sweep"),
    ("... by need, at the cost of 32", "sweep, 32 residual channels by need", "sweep, 32 residual channels"),
    ("down in 16 bits", "sweep, down in 16 bits", "sweep"),
    ("down in 16 bits", "sweep, 64 residual channels, down in 16 bits", "sweep, 64 residual channels"),
)
# Llama 70B's MLP at prefill and Qwen3 1.7B's for one token: width, intermediate width, tokens.
MLPS = ((8192, 28672, 8192), (2048, 6144, 1))
# By `scale_search` + `residual_channels`, as quantize_searches.json names them.
SEARCHES = (("four over six", "1+0"), ("sweep", "2+0"), ("64 residual channels", "0+64"), ("both", "2+64"))


def loss_of(metrics: dict[str, Any]) -> tuple[float, float | None]:
    """KL, or how far the cosine is from 1, and its standard error; older records have none."""
    if "kl" in metrics:
        return metrics["kl"], metrics.get("kl_error")
    return 1 - metrics["cosine"], metrics.get("cosine_error")


def gain(found: dict[str, Any] | None, before: dict[str, Any] | None) -> str:
    """What is left of the loss, and its standard error as of two independent figures, which is more than it is."""
    if found is None or before is None:
        return "not run"
    (after, after_error), (least, least_error) = loss_of(found), loss_of(before)
    if after_error is None or least_error is None:
        return f"{after / least:.2f}"
    error = after / least * ((after_error / after) ** 2 + (least_error / least) ** 2) ** 0.5
    return f"{after / least:.2f} ± {error:.2f}"


def gains(accuracy: dict[str, Any], activations: dict[str, Any]) -> list[str]:
    """One row for each part: what of W4A4's loss is left with it, of what was lost without it."""
    rows = ["| part | added to | llama | qwen3_moe | MiniLM |", "|---|---|---|---|---|"]
    for part, label, before in WEIGHTS:
        recorded = [accuracy["subjects"][name]["recipes"] for name in SUBJECTS]
        cells = [gain(*(rows.get(key, {}).get("W4A4") for key in (label, before))) for rows in recorded]
        rows.append(f"| {part} | `{before}` | {' | '.join(cells)} |")
    for part, label, before in ACTIVATIONS:
        recorded = [activations["subjects"][name]["W4"] for name in SUBJECTS]
        cells = [gain(rows.get(label), rows.get(before)) for rows in recorded]
        rows.append(f"| {part} | {before} | {' | '.join(cells)} |")
    return rows


def costs(searches: dict[str, Any]) -> list[str]:
    """What searches and residual channels cost before gate and up of an MLP: bytes and operations of the B200's
    roofline, and the quantizer's time on an H200, beside that roofline."""
    rows = [
        "| MLP, tokens | activations | weight bytes | operations | quantizer | more than amax | of the MLP's time |",
        "|---|---|---|---|---|---|---|",
    ]
    for width, intermediate, tokens in MLPS:
        (times,) = (
            {name: timing["median_us"] for name, timing in case["timings"].items()}
            for case in searches["cases"]
            if (case["m"], case["k"]) == (tokens, width) and case["scale_given"]
        )
        shapes = {"in_features": width, "intermediate_features": intermediate, "out_features": width}
        plain, residual_cost = (
            subgraph_cost("gated_mlp", shapes, Decision.NVFP4_W4A4, tokens, LIMITS["b200"], "bfloat16", residual)
            for residual in (0, 64)
        )
        for label, name in SEARCHES:
            residual = int(name.split("+")[1])
            cost = residual_cost if residual else plain
            weights = 3 * width * intermediate
            columns = 2 * intermediate * residual + width * residual
            more = times[name] - times["0+0"]
            rows.append(
                f"| {width} / {intermediate}, {tokens} | {label} | +{columns / weights:.1%} | "
                f"+{cost.operations / plain.operations - 1:.1%} | {times[name] / times['0+0']:.2f}x | {more:.1f} us | "
                f"{more / plain.seconds / 1e6:.1%} |"
            )
    return rows


def main() -> None:
    recorded = [json.loads((RESULTS / "accuracy" / f"{name}.json").read_text()) for name in ("accuracy", "activations")]
    print("\n".join(gains(*recorded)), end="\n\n")
    print("\n".join(costs(json.loads((RESULTS / "kernels" / "quantize_searches.json").read_text()))))


if __name__ == "__main__":
    main()
