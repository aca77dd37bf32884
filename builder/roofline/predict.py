"""The least time a subgraph can take on a GPU: bytes over bandwidth, operations over the arithmetic peak, or what the
kernel must issue to decode 4-bit weights.

A lower bound and never a measurement: every weight and scale is read once, the subgraph's input is read and its output
written once, what lies between its products stays on the chip, and memory and tensor cores run at their published peak.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trt_nvfp4.builder.records.contents import Prediction
from trt_nvfp4.builder.roofline.word_clocks import SCHEDULERS, WORD_WEIGHTS, word_clocks
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.registry import NVFP4_W4A4
from trt_nvfp4.graph_passes.planning.kernels import kernel_class
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT
from trt_nvfp4.graph_passes.planning.kinds.registry import KINDS, kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan


@dataclass(frozen=True)
class Limits:
    """Published peaks of one GPU: bytes per second, and dense operations per second by operand type.

    `tflops` maps fp4, fp8 and bf16 to 1e12 operations per second (a multiply-add is two) without sparsity; a type that
    the tensor cores lack is absent. 16-bit products accumulate in float32. `sm_count` SMs of `family` (as in
    `word_clocks`) run at `sm_clock` Hz: the published boost clock, Hopper's as measured under tensor core load.
    """

    gpu: str
    bandwidth: float
    tflops: Mapping[str, float]
    family: str
    sm_count: int
    sm_clock: float
    source: str

    def operations_per_second(self, arithmetic: str) -> float:
        """The peak of an operand type. Raises ValueError for one that this GPU does not multiply."""
        if arithmetic == "tf32":
            return self.tflops["bf16"] / 2 * 1e12
        if arithmetic not in self.tflops:
            raise ValueError(f"{self.gpu} has no {arithmetic} tensor cores")
        return self.tflops[arithmetic] * 1e12


def _tflops(fp4: float | None, fp8: float, bf16: float) -> dict[str, float]:
    return {"fp8": fp8, "bf16": bf16} | ({} if fp4 is None else {"fp4": fp4})


# Target name -> limits of the GPU that stands for it. Vendors' sparse figures are halved.
LIMITS = {
    "thor": Limits(
        "Jetson T5000",
        273e9,
        _tflops(1035, 517, 258),
        "sm100",
        20,
        1.575e9,
        "Jetson Thor data sheet (2070 FP4 and 1035 FP8 TFLOPS, sparse); BF16 is half of FP8",
    ),
    "b200": Limits("B200", 8.0e12, _tflops(9000, 4500, 2250), "sm100", 148, 1.85e9, "HGX B200 data sheet, per GPU"),
    "b300": Limits("B300", 8.0e12, _tflops(13500, 4500, 2250), "sm100", 148, 1.92e9, "HGX B300 data sheet, per GPU"),
    "rtx-blackwell": Limits(
        "RTX PRO 6000 Blackwell Workstation",
        1.792e12,
        _tflops(2015, 1008, 504),
        "sm120",
        188,
        2.617e9,
        "RTX Blackwell PRO architecture whitepaper (4000 AI TOPS are FP4, sparse)",
    ),
    "spark": Limits(
        "GB10",
        273e9,
        _tflops(500, 250, 125),
        "sm120",
        48,
        2.418e9,
        "DGX Spark data sheet (1 PFLOP FP4, sparse); FP8, BF16 by halves",
    ),
    "h200": Limits(
        "H200 SXM", 4.8e12, _tflops(None, 1979, 989), "sm90", 132, 1.8e9, "H200 data sheet (sparse figures halved)"
    ),
    "h100": Limits(
        "H100 SXM", 3.35e12, _tflops(None, 1979, 989), "sm90", 132, 1.8e9, "H100 data sheet (sparse figures halved)"
    ),
    "ada": Limits(
        "L40S", 864e9, _tflops(None, 733, 362), "sm89", 142, 2.52e9, "L40S data sheet (sparse figures halved)"
    ),
}


# What bounds the grouped W4A4 kernel (plugins/kernels/w4a4/w4a4_experts.cuh) on a B200 beside its limits above: SMs and
# the bytes per second that one reads through the L2 cache: 64 a clock at 1.85 GHz, an assumption.
B200_SM_COUNT = 148
B200_SM_BANDWIDTH = 64 * 1.85e9
GROUPED_TILE = 128  # rows and columns


@dataclass(frozen=True)
class Cost:
    """The work of a subgraph, and the least `seconds` that it takes; `bound` by "memory", "compute" (tensor cores) or
    "issue" (instructions that decode weights)."""

    seconds: float
    bytes: float
    operations: float
    bound: str


def subgraph_cost(
    kind: str,
    shapes: Mapping[str, int],
    decision: Decision,
    tokens: int,
    limits: Limits,
    dtype: str = "bfloat16",
    residual: int = 0,
) -> Cost:
    """The roofline of one subgraph of a plan at `tokens` rows of input.

    `kind`, `shapes`, `decision` and `dtype` (of the activations) as in `PlannedSubgraph`; a decision "keep" computes in
    `dtype`. For an attention, rows are sequences with full caches.
    Activations in and out have `dtype`. `residual`: the recipe's residual channels, which 4-bit activations have; the
    channels of the input are put in order before, in memory. Raises ValueError when the GPU cannot multiply as decided,
    and for a kind whose parts are predicted instead.
    """
    costs = []
    for work in KINDS[kind].work(shapes, decision, tokens, dtype, residual):
        cost = roofline(work.bytes, work.operations, limits, work.arithmetic)
        if work.decoded:
            cost = slower(cost, issue_seconds(work.decoded, work.rows, limits, dtype), "issue")
        costs.append(cost)
    slowest = max(costs, key=lambda cost: cost.seconds)
    seconds, moved, operations = (sum(getattr(c, part) for c in costs) for part in ("seconds", "bytes", "operations"))
    return Cost(seconds, moved, operations, slowest.bound)


def issue_seconds(weights: float, tokens: int, limits: Limits, dtype: str) -> float:
    """Seconds in which all SMs decode `weights` 4-bit weights and multiply them by `tokens` rows of `dtype`."""
    words = weights / WORD_WEIGHTS / (limits.sm_count * SCHEDULERS)
    return words * word_clocks(limits.family, dtype, tokens) / limits.sm_clock


def slower(cost: Cost, seconds: float, bound: str) -> Cost:
    """`cost`, or the same bound by something that takes longer."""
    return cost if seconds <= cost.seconds else replace(cost, seconds=seconds, bound=bound)


def grouped_seconds(tokens: Sequence[int], n: int, k: int) -> dict[str, float]:
    """The bounds of the grouped W4A4 kernel on a B200, by name, for groups of `tokens` rows with a weight [n, k] each.

    "memory": the weights of groups with rows, and 16-bit rows in and out, once. "compute" and "operands": a group's
    rows are padded to tiles, and tiles run in rounds of one per SM; a round multiplies a tile, or reads its operands.
    """
    tiles = sum(math.ceil(rows / GROUPED_TILE) for rows in tokens) * math.ceil(n / GROUPED_TILE)
    rounds = math.ceil(tiles / B200_SM_COUNT)
    limits, weight_bytes = LIMITS["b200"], NVFP4_W4A4.weight_bytes
    assert weight_bytes is not None
    moved = sum(rows > 0 for rows in tokens) * n * k * weight_bytes + 2 * sum(tokens) * (n + k)
    multiplied = 2 * GROUPED_TILE**2 * k * B200_SM_COUNT
    return {
        "memory": moved / limits.bandwidth,
        "compute": rounds * multiplied / limits.operations_per_second("fp4"),
        "operands": rounds * 2 * GROUPED_TILE * k * weight_bytes / B200_SM_BANDWIDTH,
    }


def roofline(bytes_moved: float, operations: float, limits: Limits, arithmetic: str) -> Cost:
    """The larger of the two times."""
    memory, compute = bytes_moved / limits.bandwidth, operations / limits.operations_per_second(arithmetic)
    return Cost(max(memory, compute), bytes_moved, operations, "memory" if memory >= compute else "compute")


def predict(plan: Plan, tokens: Mapping[str, int], limits: Limits, capabilities: Capabilities) -> list[Prediction]:
    """For every replaced subgraph of a plan: its cost as planned, and the least microseconds as planned and otherwise.

    Nothing is predicted of a subgraph that
    generic kernels serve: they use no tensor cores, whose peak the roofline knows.
    """
    entries: list[Prediction] = []
    for subgraph in plan.subgraphs:
        kernels = kernel_class(subgraph, capabilities)
        if kernels is None or kernels.is_generic or kind_of(subgraph).is_whole_layer:  # a layer's parts are predicted
            continue
        rows = tokens[subgraph.name]
        decisions = {"nvfp4": subgraph.decision, "fp8": Decision.FP8, "bf16": Decision.BF16}
        residual = subgraph.own(parse(plan.recipe)).residual
        costs = {
            name: subgraph_cost(subgraph.kind, subgraph.shapes, decision, rows, limits, subgraph.dtype, residual)
            for name, decision in decisions.items()
        }
        planned = costs["nvfp4"]
        entries.append(
            {
                "names": [subgraph.name],
                "kind": subgraph.kind,
                "decision": subgraph.decision,
                "shapes": dict(subgraph.shapes),
                "tokens": rows,
                "bytes": planned.bytes,
                "operations": planned.operations,
                "bound": planned.bound,
                "predicted_us": {name: cost.seconds * 1e6 for name, cost in costs.items()},
            }
        )
    return entries


def slow_decoding(predicted: Sequence[Prediction], capabilities: Capabilities) -> list[str]:
    """A warning about W4A16 subgraphs that decode their weights slower than memory brings them, where FP4 tensor cores
    would not: at most one."""
    if not capabilities.nvfp4_w4a4:
        return []
    decoded = (Decision.NVFP4_W4A16, Decision.NVFP4_MIXED)
    slow = [entry for entry in predicted if entry["decision"] in decoded and entry["bound"] == "issue"]
    if not slow:
        return []
    first = slow[0]
    others = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    what = "W4A16" if first["decision"] == Decision.NVFP4_W4A16 else "down, which reads 16-bit activations,"
    return [
        f"{first['names'][0]}{others}: at {first['tokens']} rows {what} decodes weights slower than memory brings them "
        f"on {capabilities.target}; nvfp4_w4a4 is faster there: give calibration data, or choose it in the plan"
    ]


def share(plan: Plan, tokens: Mapping[str, int], predicted: Sequence[Prediction], weight_bytes: int) -> str:
    """The share of the predicted subgraphs in the whole model, in words.

    Bytes are those of the original's weights, `weight_bytes` in all; operations those of products with weights, which
    leaves out attention itself.
    """
    names = {name for entry in predicted if KINDS[entry["kind"]].has_weights for name in entry["names"]}
    whole: dict[str, float] = {}
    part: dict[str, float] = {}
    counted: set[str] = set()
    for entry in sorted(plan.subgraphs, key=lambda entry: entry.name not in names):
        if "out_features" not in entry.shapes or not counted.isdisjoint(entry.nodes):
            continue  # a router's block that was not recognised; a linear of an MLP that is counted already
        counted.update(entry.nodes)
        each = 4 if plan.activations.dtype is not None else KEPT[entry.dtype][0]
        kind, rows = kind_of(entry), tokens[entry.name]
        stored, multiplied = each * kind.stored_weights(entry.shapes), kind.weights(entry.shapes, rows)[1]
        for sums in (whole, part) if entry.name in names else (whole,):
            sums["bytes"] = sums.get("bytes", 0) + stored
            sums["operations"] = sums.get("operations", 0) + multiplied * rows
    if not part:
        return "no subgraph"
    of_bytes = min(1.0, part["bytes"] / max(weight_bytes, 1))
    return (
        f"{len(names)} replaced products, not the whole model: {of_bytes:.0%} of its weight bytes, "
        f"{part['operations'] / whole['operations']:.0%} of the operations of its linears"
    )
