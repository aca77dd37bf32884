"""Linears, MLPs and mixtures of experts: what their products are computed in, and what that takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import OP as FP8_MOE
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import OP as FP8_MLP
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import K_STEP, filled
from trt_nvfp4.graph_passes.lowerings.registry import LOWERINGS, lowering_on
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT, Decided, Gemm, KernelClass, Kind, PlanContext, Work
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.products import (
    GatedMlpSubgraph,
    LinearSubgraph,
    MlpSubgraph,
    MoeSubgraph,
    ProductSubgraph,
)
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.weights.published_fp8 import is_published_in_fp8

#: W4A16 decodes the weights again for every 32 tokens, on Hopper for every 64: with more tokens than these, 16-bit
#: weights are faster (docs/figures/roofline.md; on an H200, benchmarks/results/models/vla.json).
MOST_W4A16_TOKENS = 128
# Against FP8: with W4A16 half as much is read and products are half as fast. Measured on an
# H200 (benchmarks/results/kernels/nvfp4_or_fp8.json).
_MLP_TOKENS = 32
# An expert's tokens count, and those of a call, whose weights are read again beyond so many.
_MOE_TOKENS, _EXPERT_TOKENS = 256, 40
# With so many times fewer rows than the network's largest product, a product only reads its weights.
_FEWER_ROWS = 16
# Where scales of activations are found at run time, which takes FP8 a third matrix product.
_UNCALIBRATED = 2
# plugins/kernels/heuristics: outputs of an FP8 product come in vectors of 8.
_FP8_OUTPUTS = 8


@dataclass(frozen=True)
class Candidate:
    """A decision, and why it would be taken."""

    decision: Decision
    why: str
    code: ReasonCode = ReasonCode.PREFERRED


@dataclass(frozen=True)
class _Wanted:
    """The inputs of a subgraph's candidates; `tokens`: rows of its input, `most_tokens`: of any; 0 where they do not
    count."""

    capabilities: Capabilities
    precision: str
    calibrated: bool
    moe: str = "plugin"
    tokens: int = 0
    most_tokens: int = 0


class Products(Kind):
    """Products with weights, which NVFP4, FP8 or 16 bits serve."""

    #: Whether NVFP4 activations are an alternative to 16-bit ones without calibration data, where tokens are many; and
    #: whether FP8 weights that the checkpoint publishes are taken.
    is_dense: ClassVar[bool] = True

    def decide(self, subgraph: ProductSubgraph, context: PlanContext) -> dict[str, Decided]:
        """The first of the candidates that target and subgraph allow, and why not those before."""
        unselected = context.selection.unselected(subgraph)
        if unselected is not None:
            # What is unsupported says more: a router, for example, behind which no block was recognised.
            return {subgraph.name: (Decision.KEEP, subgraph.unsupported or unselected)}
        if subgraph.unsupported is not None and subgraph.can_be_replaced:
            text = f"{subgraph.unsupported.text}; an edited plan may still replace it"
            return {subgraph.name: (Decision.KEEP, Reason(subgraph.unsupported.code, text))}
        wanted = _Wanted(
            context.capabilities,
            context.options.precision,
            context.has_ranges(subgraph),
            context.options.moe,
            0 if context.options.tokens is None else context.options.tokens[subgraph.name],
            0 if context.options.tokens is None else max(context.options.tokens.values()),
        )
        if subgraph.name in context.edges:
            return {subgraph.name: (Decision.KEEP, Reason(ReasonCode.EDGE, context.edges[subgraph.name]))}
        against: dict[str, Reason] = {}
        for candidate in self.candidates(subgraph, wanted):
            lowering = lowering_on(candidate.decision, subgraph, context.capabilities)
            unsuitable = lowering.unsuitable(subgraph, context.capabilities)
            if unsuitable is not None:
                against.setdefault(unsuitable.text, unsuitable)
                continue
            code = candidate.code
            if against and code == ReasonCode.PREFERRED:
                code = next(iter(against.values())).code
            return {subgraph.name: (candidate.decision, Reason(code, "; ".join([*against, candidate.why])))}
        raise AssertionError("keep is always possible")

    def choices(
        self, subgraph: ProductSubgraph, planned: Decision, capabilities: Capabilities, precision: str, kv_cache: str
    ) -> list[Decision]:
        """Keep is among them where it means 16 bits, and where nothing else is possible."""
        if subgraph.unsupported is not None:
            return [Decision.KEEP]
        allowed = [
            candidate.decision
            for candidate in self.candidates(subgraph, _Wanted(capabilities, precision, calibrated=True))
            if lowering_on(candidate.decision, subgraph, capabilities).unsuitable(subgraph, capabilities) is None
        ]
        return [decision for decision in allowed if decision != Decision.KEEP or Decision.BF16 not in allowed]

    def candidates(self, subgraph: ProductSubgraph, wanted: _Wanted) -> list[Candidate]:
        """Ways to compute it, best first; some of them may be impossible."""
        precision, tokens, dtype = wanted.precision, wanted.tokens, subgraph.dtype
        # Q/DQ nodes need scales, plugins find them.
        plugin = lowering_on(Decision.FP8, subgraph, wanted.capabilities).is_plugin
        uncalibrated = "activation scales computed at run time" if plugin else "weights only"
        fp8 = f"FP8, {'calibrated activation scales' if wanted.calibrated else f'no calibration data: {uncalibrated}'}"
        w4a4 = "NVFP4 weights and activations"
        found: list[Candidate] = []
        if precision == "auto" and self.is_dense and is_published_in_fp8(subgraph):
            text = f"{fp8}; the checkpoint's weights are FP8"
            found.append(Candidate(Decision.FP8, text, ReasonCode.PUBLISHED_IN_FP8))
        most = self.most_w4a16_tokens(subgraph.shapes, wanted.calibrated)
        fast_fp8 = not wanted.capabilities.nvfp4_w4a4 and (plugin or wanted.calibrated)
        if precision == "auto" and fast_fp8 and tokens > most:
            why = f"faster than NVFP4 weights above {most} tokens, and --opt-shapes has {tokens}"
            text = f"{fp8}: {why} (--precision nvfp4 takes NVFP4 weights)"
            found.append(Candidate(Decision.FP8, text, ReasonCode.FASTER_IN_FP8))
        if precision in ("auto", "nvfp4") and wanted.calibrated:
            if precision == "auto" and self.is_dense and 0 < tokens <= wanted.most_tokens // _FEWER_ROWS:
                rows = f"{tokens} row{'s' * (tokens > 1)} of input, and other products have {wanted.most_tokens}"
                text = f"W4A16, {dtype} activations: {rows}"
                found.append(Candidate(Decision.NVFP4_W4A16, text, ReasonCode.FEW_ROWS))
            mixed = "NVFP4 weights; NVFP4 activations before gate and up, 16-bit activations before down"
            found += [
                Candidate(Decision.NVFP4_W4A4, f"{w4a4}, calibrated activation scales"),
                Candidate(Decision.NVFP4_MIXED, mixed),
                Candidate(Decision.NVFP4_W4A16, f"W4A16, {dtype} activations"),
            ]
        elif precision in ("auto", "nvfp4"):
            w4a4 += ", activation scales computed at run time"
            if precision == "auto" and self.is_dense and tokens > MOST_W4A16_TOKENS:
                why = f"faster than W4A16 above {MOST_W4A16_TOKENS} tokens, and --opt-shapes has {tokens}"
                text = f"{w4a4}: {why} (--precision nvfp4 takes W4A16)"
                found.append(Candidate(Decision.NVFP4_W4A4, text, ReasonCode.FASTER_IN_W4A4))
            text = f"W4A16, {dtype} activations: no calibration data for activation scales"
            found.append(Candidate(Decision.NVFP4_W4A16, text, ReasonCode.NO_CALIBRATION))
            found.append(Candidate(Decision.NVFP4_W4A4, w4a4))
        if precision == "native-nvfp4":
            text = "TensorRT's own NVFP4 layers, calibrated activation scales"
            found.append(Candidate(Decision.NATIVE_NVFP4, text))
        if precision != "bf16":
            found.append(Candidate(Decision.FP8, fp8))
        if dtype == "float32":
            found.append(Candidate(Decision.BF16, "BF16 instead of float32"))
        return [*found, Candidate(Decision.KEEP, f"stays {dtype}")]

    def most_w4a16_tokens(self, shapes: Mapping[str, int], calibrated: bool) -> int:
        """The most rows of input at which W4A16 is at least about as fast as FP8; `calibrated`: FP8 has scales of
        activations."""
        return _MLP_TOKENS if calibrated else _UNCALIBRATED * _MLP_TOKENS

    def kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        lowering = entry.lowering
        if not lowering.is_plugin:
            return KernelClass("TensorRT", "TensorRT's own layers")
        if entry.dtype == "float32":
            return KernelClass(
                "generic", "its activations are float32", "leave --activations at auto, or export the model in 16 bits"
            )
        if lowering.weights == "fp8":
            return self._fp8_kernels(entry, capabilities)
        if odd := [k for k in self._depths(entry) if k % K_STEP]:
            return KernelClass(
                "generic",
                f"K = {odd[0]} is not a multiple of {K_STEP}",
                f"leave it in {entry.dtype} with --exclude, or plan fp8",
            )
        if lowering.arithmetic == "fp4":
            if not capabilities.nvfp4_w4a4:
                return KernelClass(
                    "generic", f"{capabilities.target} has no FP4 tensor cores", "plan nvfp4_w4a16 or fp8 instead"
                )
            if entry.decision == Decision.NVFP4_MIXED:
                return KernelClass("W4A4", f"FP4 tensor cores; for down, 4-bit weights are decoded to {entry.dtype}")
            return KernelClass("W4A4", "FP4 tensor cores")
        return KernelClass("W4A16", f"4-bit weights are decoded for products in {entry.dtype}")

    def _fp8_kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        if (outputs := entry.shapes["out_features"]) % _FP8_OUTPUTS:
            why = f"its {outputs} outputs are not a multiple of {_FP8_OUTPUTS}"
            return KernelClass("generic", why, f"keep it in {entry.dtype}")
        return _fp8_class(entry, FP8_MLP, capabilities.fp8_mlp_plugin, capabilities)

    def _depths(self, entry: PlannedSubgraph) -> list[int]:
        """The K of each product, as its plugin has it."""
        depths = {key: entry.shapes.get(key, 0) for key in ("in_features", "intermediate_features", "shared_features")}
        # The linears that a mixed MLP becomes have the model's own K.
        if self.is_dense and entry.decision != Decision.NVFP4_MIXED:
            depths["intermediate_features"] = filled(depths["intermediate_features"])
        return [k for k in depths.values() if k]

    def work(
        self, shapes: Mapping[str, int], decision: Decision, tokens: int, dtype: str, residual: int = 0
    ) -> list[Work]:
        if decision == Decision.NVFP4_MIXED:
            return self._mixed_work(shapes, tokens, dtype, residual)
        if decision != Decision.NVFP4_W4A4 or shapes.get("layers", 1) > 1:
            residual = 0
        lowering = LOWERINGS[decision]
        weight_bytes, arithmetic = lowering.weight_bytes, lowering.arithmetic
        if weight_bytes is None:
            weight_bytes, arithmetic = KEPT[dtype]
        read, multiplied = self.weights(shapes, tokens, residual)
        reordered = 2 * shapes["in_features"] if residual else 0
        activations = tokens * (shapes["in_features"] + shapes["out_features"] + reordered)
        moved, operations = read * weight_bytes + activations * KEPT[dtype][0], 2.0 * tokens * multiplied
        if decision != Decision.NVFP4_W4A16 or dtype == "float32":
            return [Work(moved, operations, arithmetic)]
        # An expert's rows are those of the tokens that choose it.
        return [Work(moved, operations, arithmetic, read, math.ceil(tokens * multiplied / read))]

    def _mixed_work(self, shapes: Mapping[str, int], tokens: int, dtype: str, residual: int) -> list[Work]:
        """Gate and up in W4A4, the gates, which read and write memory, and down in W4A16."""
        up, down = self.gemms(shapes)
        linear, element = Linear(), KEPT[dtype]
        works = [
            *linear.work({"in_features": up.k, "out_features": up.n}, Decision.NVFP4_W4A4, tokens, dtype, residual),
            Work(tokens * (up.n + down.k) * element[0], 0.0, element[1]),
            *linear.work({"in_features": down.k, "out_features": down.n}, Decision.NVFP4_W4A16, tokens, dtype),
        ]
        return works * up.count


class Linear(Products):
    """Linears of one input."""

    subgraph = LinearSubgraph
    selection = "all"
    unselected_in_reports = "count"

    def gemms(self, shapes: Mapping[str, int]) -> list[Gemm]:
        return [Gemm(shapes["out_features"], shapes["in_features"])]


class Mlp(Products):
    """MLPs without a gate."""

    subgraph: ClassVar[type[MlpSubgraph]] = MlpSubgraph
    selection = "default"
    ups = 1

    def gemms(self, shapes: Mapping[str, int]) -> list[Gemm]:
        intermediate, layers = shapes["intermediate_features"], shapes.get("layers", 1)
        up = Gemm(self.ups * intermediate, shapes["in_features"], layers)
        return [up, Gemm(shapes["out_features"], intermediate, layers)]

    def covered_by(self, entry: PlannedSubgraph, others: Sequence[PlannedSubgraph], require: str) -> bool:
        """Whether linears of it, planned one by one, have all its weights."""
        linear = Linear()
        parts = [
            other
            for other in others
            if other.kind == linear.name and other.lowering.meets(require) and set(other.nodes) <= set(entry.nodes)
        ]
        return sum(linear.stored_weights(part.shapes) for part in parts) == self.stored_weights(entry.shapes)


class GatedMlp(Mlp):
    """MLPs with a gate."""

    subgraph = GatedMlpSubgraph
    ups = 2


class Moe(Products):
    """Mixtures of experts."""

    subgraph = MoeSubgraph
    selection = "default"
    is_dense = False

    def candidates(self, subgraph: ProductSubgraph, wanted: _Wanted) -> list[Candidate]:
        found = super().candidates(subgraph, wanted)
        if wanted.moe != "trt_moe":
            return found
        return [Candidate(Decision.TRT_MOE, f"TensorRT's own MoE layer, experts in {subgraph.dtype}"), *found]

    def choices(
        self, subgraph: ProductSubgraph, planned: Decision, capabilities: Capabilities, precision: str, kv_cache: str
    ) -> list[Decision]:
        """Where the plan has TensorRT's own MoE layer, that stands for 16 bits."""
        found = super().choices(subgraph, planned, capabilities, precision, kv_cache)
        if planned != Decision.TRT_MOE:
            return found
        return [planned if decision == Decision.KEEP else decision for decision in found]

    def most_w4a16_tokens(self, shapes: Mapping[str, int], calibrated: bool) -> int:
        most = min(_MOE_TOKENS, _EXPERT_TOKENS * shapes["experts"] // shapes["top_k"])
        return most if calibrated else _UNCALIBRATED * most

    def _fp8_kernels(self, entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass:
        served = capabilities.fp8_plugins and bool(entry.shapes["gated"])
        return _fp8_class(entry, FP8_MOE, served, capabilities)

    def weights(self, shapes: Mapping[str, int], tokens: int, residual: int = 0) -> tuple[float, float]:
        """Experts are chosen evenly, and read when a token chooses them."""
        expert, shared = self._expert(shapes, residual)
        read = experts_touched(shapes["experts"], shapes["top_k"], tokens)
        return expert * read + shared, float(expert * shapes["top_k"] + shared)

    def stored_weights(self, shapes: Mapping[str, int]) -> float:
        expert, shared = self._expert(shapes, 0)
        return float(expert * shapes["experts"] + shared)

    @staticmethod
    def _expert(shapes: Mapping[str, int], residual: int) -> tuple[int, int]:
        """Weights of one expert, and of the shared one."""

        def weights(intermediate: int) -> int:
            if not intermediate:
                return 0
            ups = (1 + shapes["gated"]) * intermediate * (shapes["in_features"] + residual)
            return ups + shapes["out_features"] * (intermediate + residual)

        return weights(shapes["intermediate_features"]), weights(shapes.get("shared_features", 0))


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """How many of `experts` at least one of `tokens` chooses, on average, when each chooses `top_k` evenly."""
    return experts * (1 - math.pow(1 - top_k / experts, tokens))


def _fp8_class(entry: PlannedSubgraph, op: str, served: bool, capabilities: Capabilities) -> KernelClass:
    if served:
        return KernelClass("FP8", "FP8 tensor cores")
    why = f"{op} has no kernels of its own for it on {capabilities.target}"
    return KernelClass("generic", why, f"plan NVFP4, or keep it in {entry.dtype}")
