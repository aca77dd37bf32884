"""Predicted times of the W4A16 kernels on Hopper beside the recorded ones: memory, issue, and what surrounds a product.

The roofline is a floor. A time has more in it: the launch or the exchange of activations between SMs, staging them,
waiting along K, adding up partial sums. These terms are fitted to the records, one set for each kernel, and say how far
the floor's two parts, memory and issue, carry.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.pages.records import load
from trt_nvfp4.builder.roofline.predict import LIMITS
from trt_nvfp4.builder.roofline.word_clocks import SCHEDULERS, WORD_WEIGHTS, word_clocks
from trt_nvfp4.graph_passes.lowerings.registry import NVFP4_W4A16

# Bytes per second as these GPUs read them (`read_bandwidth` of the records), not as published.
READ_BANDWIDTH = {"h200": 4.6e12, "h100": 3.07e12}
TILE = 32  # rows of a task
# Of K's words of one SM, the waiting for activations that is seen in a persistent MLP by the SM90 kernels.
SEEN_K = 4096


@dataclass(frozen=True)
class Kernel:
    """Microseconds around a product, fitted to the records.

    `issue`: measured over counted clocks of a word; `fixed`: launch or exchange; `token`: each row; `staged`: each row
    and 1024 of K of an SM; `depth`: 1024 of K of an SM; `split`: each doubling of parts of K; `norm`, `norm_staged`: a
    layer's RMSNorm and each of its rows and 1024 of K. `rows`: the most of one pass over the weights.
    """

    rows: int
    issue: float
    fixed: float
    token: float
    staged: float = 0.0
    depth: float = 0.0
    split: float = 0.0
    norm: float = 0.0
    norm_staged: float = 0.0


KERNELS = {
    ("small", "linear"): Kernel(16, 1.0, 1.346, 0.061, 0.033, 0.088),
    ("mma.sync", "linear"): Kernel(32, 1.713, 2.05, 0.257, 0.046, 0.117, 0.923),
    ("SM90", "linear"): Kernel(64, 1.445, 3.281, 0.063, 0.0, 0.36, 1.417),
    ("mma.sync", "mlp"): Kernel(32, 1.523, 3.534, 0.094, 0.072, 0.0, 0.36, 1.608, 0.101),
    ("SM90", "mlp"): Kernel(64, 1.317, 2.276, 0.071, 0.0, 1.3, 0.0, 1.393, 0.061),
}


@dataclass(frozen=True)
class Run:
    """One recorded time: `products` are (n, k, count), `layers` of an MLP one after the other."""

    kernel: str
    kind: str
    gpu: str
    tokens: int
    products: tuple[tuple[int, int, int], ...]
    dtype: str
    norm: bool
    measured: float

    @property
    def predicted(self) -> float:
        """Microseconds."""
        kernel, limits = KERNELS[self.kernel, self.kind], LIMITS[self.gpu]
        # By mma.sync the loop of every other GPU since SM80, which Hopper shares.
        family = "sm89" if self.kernel == "mma.sync" else "sm90"
        passes, rest = divmod(self.tokens, kernel.rows)
        total = 0.0
        for n, k, count in self.products:
            splits = 1.0 if self.kernel == "small" else max(1.0, min(limits.sm_count / math.ceil(n / TILE), k / 512))
            deep = k / splits
            if (self.kernel, self.kind) == ("SM90", "mlp"):
                deep = min(deep, SEEN_K)
            weights = n * k / limits.sm_count
            if self.kernel == "small":
                weights = max(weights, TILE * k)
            memory = n * k * (NVFP4_W4A16.weight_bytes or 0.0) / READ_BANDWIDTH[self.gpu] * 1e6
            for rows in [kernel.rows] * passes + ([rest] if rest else []):
                clocks = kernel.issue * word_clocks(family, self.dtype, rows)
                work = weights / WORD_WEIGHTS / SCHEDULERS * clocks / limits.sm_clock * 1e6
                around = kernel.fixed + kernel.token * rows + kernel.split * math.log2(splits)
                around += (kernel.staged * rows + kernel.depth) * deep / 1000
                # A persistent kernel reads ahead while activations are exchanged; a launch begins with them.
                total += count * (max(memory, around + work) if self.kind == "mlp" else around + max(memory, work))
        if self.norm:
            _, hidden, layers = self.products[0]
            total += layers * (kernel.norm + kernel.norm_staged * self.tokens * hidden / 1000)
        return total

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def runs() -> Iterator[Run]:
    """Every recorded time of a W4A16 linear or MLP whose kernel the record names."""
    for name, section, gpu in (
        ("crossovers", "linear", "h200"),
        ("crossovers_small", "small", "h200"),
        ("crossovers_small_h100", "small", "h100"),
    ):
        for entry in load(name)[section]:
            times = {what: timing["median_us"] for what, timing in entry["timings"].items()}
            product = ((entry["n"], entry["k"], 1),)
            others = [times[what] for what in ("w4a16 by mma.sync", "w4a16 of SM90") if what in times]
            if "w4a16 by mma.sync" in times:
                yield Run("mma.sync", "linear", gpu, entry["m"], product, "float16", False, others[0])
            yield Run("SM90", "linear", gpu, entry["m"], product, "float16", False, others[-1])
            # AUTO took the kernel of small linears where it is clearly faster than both; the record does not name it.
            if section == "small" and len(others) == 2 and times["auto"] < 0.93 * min(others):
                yield Run("small", "linear", gpu, entry["m"], product, "float16", False, times["auto"])
    for entry in load("crossovers_mlp")["mlp"]:
        width = entry["intermediate"] * (1 + entry["gated"])
        products = (
            (width, entry["hidden"], entry["layers"]),
            (entry["hidden"], entry["intermediate"], entry["layers"]),
        )
        for what, kernel in (("w4a16 by mma.sync", "mma.sync"), ("w4a16 of SM90", "SM90")):
            if timing := entry["timings"].get(what):
                norm, us = entry["norm"], timing["median_us"]
                yield Run(kernel, "mlp", "h200", entry["m"], products, entry["dtype"], norm, us)
    for name, gpu in (("decode", "h200"), ("decode_h100", "h100")):
        for entry in load(name)["stack"]:
            products = ((2 * 16384, 2048, entry["stack"]), (2048, 16384, entry["stack"]))
            for short, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
                us = entry["timings"][f"nvfp4 persistent {short}"]["median_us"]
                yield Run("SM90", "mlp", gpu, entry["m"], products, dtype, False, us)


def section() -> Iterator[str]:
    """Predicted over measured, by kernel, for docs/figures/roofline.md."""
    found = list(runs())
    yield "| kernel | recorded times | predicted / measured: median | off by, median | least, greatest | off by > 1.5 |"
    yield "|---|---|---|---|---|---|"
    for kernel, kind in KERNELS:
        ratios = [run.ratio for run in found if (run.kernel, run.kind) == (kernel, kind)]
        yield _row(f"{kernel}, {kind}", ratios)
    yield _row("all", [run.ratio for run in found])


def _row(name: str, ratios: list[float]) -> str:
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    far = sum(not 1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    median = statistics.median(ratios)
    return f"| {name} | {len(ratios)} | {median:.2f} | {off:.0%} | {min(ratios):.2f}, {max(ratios):.2f} | {far} |"
