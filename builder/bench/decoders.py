"""Times of a decoder: the first token after a prompt, and each token at several cached lengths."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.runner import Runner
from trt_nvfp4.builder.model.decoder_contract import Decoder
from trt_nvfp4.builder.records.contents import TokenBytes
from trt_nvfp4.builder.report.charts import number
from trt_nvfp4.builder.report.html import CONTESTANTS
from trt_nvfp4.builder.roofline.predict import Limits, roofline, subgraph_cost
from trt_nvfp4.builder.roofline.token_bytes import OTHERS
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompt, and cached tokens at which a step is timed. `accepted`: tokens that a step with drafts adds
    on the mean, for which steps of `verified` tokens are timed at the longest of these."""

    prompt: int
    cached: tuple[int, ...]
    accepted: float = 1.0
    verified: tuple[int, ...] = ()


def lengths_of(decoder: Decoder, asked: Sequence[int] = (), accepted: float | None = None) -> Lengths:
    """A prompt of half the capacity, at most 512 tokens; steps at an eighth, half and all of the capacity, or those
    `asked`; with `accepted`, steps of 2, 4, 8 and 16 tokens. Raises UsageError for more than the caches hold or a step
    verifies."""
    cached = tuple(asked) or tuple(sorted({max(1, decoder.capacity // part) for part in (8, 2, 1)}))
    if wrong := [length for length in cached if not 1 <= length <= decoder.capacity]:
        raise UsageError(f"--lengths {wrong[0]}: the caches hold 1 to {decoder.capacity} tokens")
    prompt = min(512, max(1, decoder.capacity // 2))
    if accepted is None:
        return Lengths(prompt, cached)
    most = min(decoder.verified_tokens, max(cached))
    verified = tuple(count for count in (2, 4, 8, 16) if accepted <= count <= most)
    if not verified:
        raise UsageError(f"--accepted {accepted:g}: a step verifies at most {most} tokens here, drafts and one more")
    return Lengths(prompt, cached, accepted, verified)


def predict_steps(
    plan: Plan, decoder: Decoder, read: TokenBytes, limits: Limits, lengths: Lengths
) -> list[dict[str, Any]]:
    """The least microseconds of one sequence by contestant, for the prompt and for a step at each length.

    All linears and mixtures of the plan, as planned ("nvfp4") or with FP8 or BF16 in place of what it replaces; the
    caches, which plugins read up to their length and TensorRT's attention whole; norms and tables, once per call.
    """
    rows = [("prompt", lengths.prompt, lengths.prompt)]
    rows += [("verify", count, max(lengths.cached)) for count in lengths.verified]
    rows += [("step", 1, cached) for cached in lengths.cached]
    found = []
    for phase, new, cached in rows:
        us = {
            name: 1e6
            * (
                _products(plan, decoder, decision, new, limits)
                + _attention(plan, decoder, decision, new, cached, limits)
                + (read["kept"].get(OTHERS, 0.0) + read["state_bytes"]) / limits.bandwidth
            )
            for name, decision in (("nvfp4", None), ("fp8", Decision.FP8), ("bf16", Decision.BF16))
        }
        found.append(_timed(phase, new, cached, us, lengths))
    return found


def _timed(phase: str, new: int, cached: int, us: dict[str, float], lengths: Lengths) -> dict[str, Any]:
    """A row of the result; of a step that verifies drafts also what it makes in tokens per second."""
    row: dict[str, Any] = {"phase": phase, "tokens": cached, "us": us}
    if phase == "verify":
        row |= {"new": new, "tokens_per_s": {name: lengths.accepted / time * 1e6 for name, time in us.items()}}
    return row


def _products(plan: Plan, decoder: Decoder, decision: Decision | None, new: int, limits: Limits) -> float:
    """Seconds of all products with weights; `decision` in place of the plan's own for what it replaces."""
    seconds, counted, recipe = 0.0, set[str](), parse(plan.recipe)
    for entry in sorted(plan.subgraphs, key=lambda entry: entry.decision == Decision.KEEP):
        if "out_features" not in entry.shapes or not counted.isdisjoint(entry.nodes):
            continue
        counted.update(entry.nodes)
        taken = decision if decision is not None and entry.decision != Decision.KEEP else entry.decision
        is_head = entry.shapes["out_features"] == decoder.vocab_size and not decoder.all_logits
        rows, residual = min(new, decoder.logit_tokens) if is_head else new, entry.own(recipe).residual
        seconds += subgraph_cost(entry.kind, entry.shapes, taken, rows, limits, entry.dtype, residual).seconds
    return seconds


def _attention(plan: Plan, decoder: Decoder, decision: Decision | None, new: int, cached: int, limits: Limits) -> float:
    """Seconds of reading the caches, and of a prompt's scores and sums."""
    entries = [entry for entry in plan.subgraphs if kind_of(entry).caches_tokens and entry.shapes]
    plugins = [entry for entry in entries if entry.decision != Decision.KEEP and decision is None]
    item = _ITEM[decoder.cache_dtype]
    whole = sum(
        heads * (key + value)
        for heads, key, value in zip(decoder.kv_heads, decoder.head_dim, decoder.value_head_dim, strict=True)
    )
    by_plugins = sum(2 * entry.shapes["kv_heads"] * entry.shapes["head_dim"] for entry in plugins)
    moved = float(item * (whole - by_plugins) * decoder.capacity)
    moved += sum(_read(entry, cached, item) for entry in plugins)
    operations = sum(_operations(entry, new, cached) for entry in entries)
    return roofline(moved, operations, limits, KEPT["bfloat16"][1]).seconds


def _read(entry: PlannedSubgraph, cached: int, item: int) -> float:
    seen = min(cached, entry.shapes.get("window") or cached)
    size = 1 if entry.decision == Decision.ATTENTION_FP8 else item
    return 2.0 * entry.shapes["kv_heads"] * entry.shapes["head_dim"] * seen * size


def _operations(entry: PlannedSubgraph, new: int, cached: int) -> float:
    window = entry.shapes.get("window") or cached
    pairs = sum(min(cached - new + token + 1, window) for token in range(new))
    return 4.0 * entry.shapes["heads"] * entry.shapes["head_dim"] * pairs


def time_steps(
    runners: Mapping[str, Runner],
    lengths: Lengths,
    rounds: int,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Median microseconds of one sequence on each runner, in turns; what `generate` waits for, the likeliest
    token on the CPU."""
    rng = np.random.default_rng(0)
    vocab = min(runner.decoder.vocab_size for runner in runners.values())
    prompt = min(lengths.prompt, *(runner.longest_step for runner in runners.values()))
    ids = rng.integers(0, vocab, (1, prompt))
    for runner in runners.values():
        runner.start(1)
    found = []
    longest = max(lengths.cached)
    verified = rng.integers(0, vocab, (1, max(lengths.verified, default=1)))
    steps = [
        ("prompt", ids, 0),
        *(("verify", verified[:, :count], longest - count) for count in lengths.verified),
        *(("step", ids[:, :1], cached - 1) for cached in lengths.cached),
    ]
    for phase, tokens, past in steps:
        count = tokens.shape[1] if phase == "verify" else 1
        taken: dict[str, list[float]] = {name: [] for name in runners}
        for number_ in range(warm_up + rounds):
            for name, runner in runners.items():
                begun = clock()
                new = np.array([tokens.shape[1]], np.int64)
                runner.step(tokens, np.array([past], np.int64), new, count).likeliest(1)
                if number_ >= warm_up:
                    taken[name].append((clock() - begun) * 1e6)
        us = {name: statistics.median(times) for name, times in taken.items()}
        found.append(_timed(phase, tokens.shape[1], past + tokens.shape[1], us, lengths))
    return found


def steps_table(steps: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Microseconds of each contestant, and how many times ours is faster."""
    table = Table(title=title, title_justify="left")
    table.add_column("one sequence")
    names = list(steps[0]["us"])
    for name in names:
        table.add_column(f"{CONTESTANTS[name]}, us", justify="right")
    for step in steps:
        us = step["us"]
        what = {
            "prompt": "first token of a prompt of",
            "verify": f"{step.get('new')} tokens with drafts, cached:",
            "step": "a token, cached:",
        }[step["phase"]]
        cells = [number(us[name]) + ("" if name == "nvfp4" else f" ({us[name] / us['nvfp4']:.2f}x)") for name in names]
        if rates := step.get("tokens_per_s"):
            cells = [f"{cell}, {number(rate)} tokens/s" for cell, rate in zip(cells, rates.values(), strict=True)]
        table.add_row(f"{what} {step['tokens']}", *cells)
    return table
