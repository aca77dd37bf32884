"""Writes docs/figures/roofline.md: the least time of workloads on three Blackwell GPUs, beside published figures."""

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from benchmarks.pages import kernel_times
from benchmarks.pages.records import BENCHMARKS, DOCS
from trt_nvfp4.builder.report.charts import number
from trt_nvfp4.builder.roofline.predict import (
    LIMITS,
    Cost,
    Limits,
    grouped_seconds,
    issue_seconds,
    roofline,
    slower,
    subgraph_cost,
)
from trt_nvfp4.builder.roofline.word_clocks import SCHEDULERS, WORD_WEIGHTS, word_clocks
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS, NVFP4_W4A16

PAGE = DOCS / "figures" / "roofline.md"
TARGETS = ("thor", "b200", "rtx-blackwell")
DECISIONS = (Decision.NVFP4_W4A4, Decision.NVFP4_W4A16)
NVFP4_BYTES = NVFP4_W4A16.weight_bytes or 0.0

INTRODUCTION = """# Roofline

**All figures are predictions, but for the section "Against recorded runs".** A prediction is the least time that a
workload of `benchmarks/workloads.json` can take: bytes over the published memory bandwidth, operations over the
published dense peak, or the instructions that decode 4-bit weights, whichever is longest
(`builder/roofline/predict.py`).
Weights and scales are read once (4.5 bits per weight), 16-bit inputs and outputs are moved once, and values between two
products stay on the chip. W4A4 multiplies in FP4; W4A16 decodes its weights and multiplies in BF16. A multiply-add is
two operations. A kernel that reaches half of this is a good one; nobody reaches all of it.

Written by `python -m benchmarks.pages.roofline_page`; a test holds it to that.
"""

CROSSOVERS = """
## Where arithmetic takes over from memory

The table shows the number of tokens at which multiplying a weight on tensor cores takes as long as reading it. With
fewer tokens, a kernel that spends few instructions on a weight is bound by memory. So W4A4 runs on the block-scaled
tensor cores from one token on: a decode kernel of its own would save launches, not bytes. W4A16 is bound by its
instructions earlier (next section). [Tactics](tactics.md) says which kernels serve how many tokens, and what was
measured on an H200.
"""


def workloads() -> Iterator[tuple[str, str, list[Any], str, dict[str, int], int]]:
    """(section, what, its key in published.json, kind, shapes, tokens)."""
    found = json.loads((BENCHMARKS / "workloads.json").read_text())
    stack = found["mlp_stack"]
    shapes = {
        "in_features": stack["hidden"],
        "intermediate_features": stack["intermediate"],
        "out_features": stack["hidden"],
        "layers": stack["layers"],
    }
    for tokens in stack["tokens"]:
        what = f"{stack['layers']} gated MLPs {stack['hidden']}/{stack['intermediate']}, M = {tokens}"
        yield "mlp_stack", what, [tokens], "gated_mlp", shapes, tokens
    for m, n, k in found["linear"]["shapes"]:
        yield "linear", f"{m} x {n} x {k}", [m, n, k], "linear", {"in_features": k, "out_features": n}, m
    for m, n, k in found["dual_gemm_swiglu"]["shapes"]:
        # Gate and up without down: one product of twice the width, half of which is written.
        shapes = {"in_features": k, "out_features": 2 * n}
        yield "dual_gemm_swiglu", f"{m} x {n} x {k}", [m, n, k], "linear", shapes, m
    for case in found["grouped_gemm"]["cases"]:
        groups, n, k = len(case["tokens"]), case["n"], case["k"]
        shapes = {"in_features": k, "out_features": n, "groups": groups}
        what = f"{groups} groups, {sum(case['tokens'])} tokens, {n} x {k}"
        yield "grouped_gemm", what, [groups, n, k], "grouped", shapes, sum(case["tokens"])
    for model in found["moe"]["models"]:
        shapes = {
            "in_features": model["hidden"],
            "intermediate_features": model["intermediate"],
            "out_features": model["hidden"],
            "experts": model["experts"],
            "top_k": model["top_k"],
            "shared_features": model.get("shared_experts", 0) * model["intermediate"],
            "gated": 1,
        }
        for tokens in found["moe"]["tokens"]:
            yield "moe", f"{model['name']}, M = {tokens}", [tokens], "moe", shapes, tokens


def cost(kind: str, shapes: dict[str, int], decision: str, tokens: int, target: str) -> Cost:
    """Grouped products read every group's weights; the rest is what a plan knows."""
    if kind != "grouped":
        return subgraph_cost(kind, shapes, decision, tokens, LIMITS[target])
    n, k = shapes["out_features"], shapes["in_features"]
    moved = shapes["groups"] * n * k * NVFP4_BYTES + 2 * tokens * (n + k)
    limits = LIMITS[target]
    found = roofline(moved, 2.0 * tokens * n * k, limits, LOWERINGS[decision].arithmetic)
    if decision != Decision.NVFP4_W4A16:
        return found
    rows = math.ceil(tokens / shapes["groups"])
    return slower(found, issue_seconds(shapes["groups"] * n * k, rows, limits, "bfloat16"), "issue")


GROUPED_INTRODUCTION = """Predictions too, for the kernel as it is written (`plugins/kernels/w4a4/w4a4_experts.cuh`).
Each group's rows are padded to tiles of 128. Tiles of 128 x 128 run in rounds of one per SM, and the last round takes
as long as a full one. Operands are assumed to reach an SM through the L2 cache at 64 bytes a clock. The times of
launching the kernel and of filling its pipelines are left out."""

ISSUE = """
## Where decoding weights takes over from memory

W4A16 decodes 4-bit weights by instructions. The table shows the clocks that a scheduler takes to decode a word (the
eight codes of a lane) at M tokens, for FP16 / BF16, and first the clocks that memory takes to deliver one. Bold:
decoding takes longer. Instructions are counted in the machine code
([`issue_slots.json`](../../benchmarks/results/kernels/issue_slots.json));
clocks per instruction were measured on Hopper, and are an assumption for every other GPU
(`builder/roofline/word_clocks.py`). On
SM100 and SM120 one instruction converts two codes to FP16: a word takes 11 instructions at 8 tokens, where bit
operations need 17. No instruction converts to BF16, which from 9 tokens on takes bit operations there too. On a B200
W4A4 is therefore the faster arithmetic from about 16 tokens on; on Thor memory is the limit up to 32 tokens. More than
32 tokens (64 on Hopper) take several passes over the weights: for prefill, W4A16 is the wrong arithmetic on every GPU
that has FP4 tensor cores.
"""

RECORDED = """
## Against recorded runs

The one part of this page that was run: recorded times of W4A16 kernels on an H200 and an H100 (`crossovers*.json`,
`decode*.json` in `benchmarks/results/`), beside predictions. These are made of the bytes that a kernel reads, the
instructions as above, and fitted terms for launches and exchanges around a product
(`benchmarks/pages/kernel_times.py`).
"""

FAR = """
Off by more than 1.5: the 18-layer stack 2048/16384 by the SM90 kernels. Its products are so long
that loads of weights hide the exchange of activations; the terms, fitted to all stacks, count that exchange in full.
"""

TITLES = {
    "mlp_stack": "The reference stack",
    "linear": "Linears (M x N x K)",
    "dual_gemm_swiglu": "Gate and up in one (M x N x K, N the intermediate size)",
    "grouped_gemm": "Grouped products",
    "moe": "MoE blocks, experts chosen evenly",
}


def grouped_section(published: dict[str, Any]) -> Iterator[str]:
    """What bounds the grouped kernel on a B200, padding and rounds counted."""
    yield from ["", "## The grouped W4A4 kernel on a B200", "", GROUPED_INTRODUCTION, ""]
    yield "| N x K | tokens of the groups | us: memory | tensor cores | operands | predicted | published by others |"
    yield "|---|---|---|---|---|---|---|"
    for case in json.loads((BENCHMARKS / "workloads.json").read_text())["grouped_gemm"]["cases"]:
        tokens, n, k = case["tokens"], case["n"], case["k"]
        seconds = grouped_seconds(tokens, n, k).values()
        times = " | ".join(number(second * 1e6) for second in (*seconds, max(seconds)))
        notes = [
            f"{entry['us']:g} us ({entry['by']})"
            for entry in published["grouped_gemm"]
            if entry["shape"] == [len(tokens), n, k]
        ]
        yield f"| {n} x {k} | {', '.join(map(str, tokens))} | {times} | {'; '.join(notes)} |"


def issue_section() -> Iterator[str]:
    """Clocks of a word by target and tokens."""
    counts = (1, 8, 16, 32, 64)
    yield f"| target | memory | {' | '.join(f'M = {count}' for count in counts)} |"
    yield "|---|---|" + "---|" * len(counts)
    for target, limits in LIMITS.items():
        each = limits.bandwidth / (limits.sm_count * SCHEDULERS)
        memory = WORD_WEIGHTS * NVFP4_BYTES / each * limits.sm_clock
        cells = []
        for count in counts:
            clocks = [word_clocks(limits.family, dtype, count) for dtype in ("float16", "bfloat16")]
            cells.append(" / ".join(f"**{each:.0f}**" if each > memory else f"{each:.0f}" for each in clocks))
        yield f"| `{target}` | {memory:.0f} | {' | '.join(cells)} |"


def page() -> str:
    """The page's text."""
    published = json.loads((BENCHMARKS / "published.json").read_text())
    lines = [INTRODUCTION, "| target | GPU | TB/s | FP4, FP8, BF16 TFLOPS (dense) | source |", "|---|---|---|---|---|"]
    for target in TARGETS:
        limits = LIMITS[target]
        peaks = ", ".join(f"{limits.tflops[kind]:g}" for kind in ("fp4", "fp8", "bf16"))
        lines.append(f"| `{target}` | {limits.gpu} | {limits.bandwidth / 1e12:g} | {peaks} | {limits.source} |")
    lines += [CROSSOVERS, "| target | W4A4 | W4A16 |", "|---|---|---|"]
    for target, limits in LIMITS.items():
        counts = [_crossover(limits, LOWERINGS[decision].arithmetic) for decision in DECISIONS]
        lines.append(f"| `{target}` | {' | '.join(counts)} |")
    lines += [ISSUE, *issue_section(), RECORDED, *kernel_times.section(), FAR]
    section = ""
    for name, what, key, kind, shapes, tokens in workloads():
        if name != section:
            section = name
            columns = " | ".join(f"{target} W4A4 / W4A16" for target in TARGETS)
            lines += ["", f"## {TITLES[name]}", "", f"| | MB | Gop | us: {columns} | published by others |"]
            lines.append("|---|---|---|" + "---|" * (len(TARGETS) + 1))
        costs = {(t, d): cost(kind, shapes, d, tokens, t) for t in TARGETS for d in DECISIONS}
        any_cost = costs[TARGETS[0], DECISIONS[0]]
        times = [" / ".join(_time(costs[target, d]) for d in DECISIONS) for target in TARGETS]
        notes = [
            f"{entry['us']:g} us on {entry['target']} ({entry['by']}): "
            f"{costs[entry['target'], entry['decision']].seconds * 1e6 / entry['us']:.0%} of the roofline"
            for entry in published.get(name, [])
            if entry["shape"] == key
        ]
        size = f"{number(any_cost.bytes / 1e6)} | {number(any_cost.operations / 1e9)}"
        lines.append(f"| {what} | {size} | {' | '.join(times)} | {'; '.join(notes)} |")
    lines += grouped_section(published)
    lines += [
        "",
        published["note"],
        "",
        "Marked *: bound by tensor cores. Marked +: by the instructions that decode weights. All others: by memory.",
        "",
    ]
    return "\n".join(lines)


def _crossover(limits: Limits, arithmetic: str) -> str:
    if arithmetic not in limits.tflops:
        return "-"
    return f"{NVFP4_BYTES * limits.operations_per_second(arithmetic) / (2 * limits.bandwidth):.0f}"


def _time(found: Cost) -> str:
    return number(found.seconds * 1e6) + {"compute": "*", "issue": "+"}.get(found.bound, "")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
