"""Every way to compute a subgraph: what it asks of target, subgraph and statistics, what it becomes, what it costs, and
how a built engine shows it. A decision is defined here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import onnx
import onnx_ir as ir

from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.graph_passes.lowerings import trt_moe, trt_nvfp4
from trt_nvfp4.graph_passes.lowerings.attention import lower_attention
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import OP as FP8_MOE
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import fp8_moe_obstacle, lower_fp8_moe
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import OP as FP8_MLP
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import fp8_mlp_obstacle, lower_fp8_mlp
from trt_nvfp4.graph_passes.lowerings.fp8_qdq import fp8_obstacle, lower_fp8
from trt_nvfp4.graph_passes.lowerings.half import lower_half
from trt_nvfp4.graph_passes.lowerings.nvfp4_mixed import OP as MIXED_OP
from trt_nvfp4.graph_passes.lowerings.nvfp4_mixed import lower_nvfp4_mixed, mixed_obstacle, mixed_statistics
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import lower_nvfp4, nvfp4_obstacle
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.plugins.ops import OPS


@dataclass(frozen=True)
class EngineLayers:
    """How an engine shows a lowering.

    `name` is the lowering's in manifests, `shown` in reports. `carrier`: the nodes of the rewritten model that compute
    the subgraph, "plugin" nodes, TensorRT's "moe_layer", or matrix "product"s. Of a product, a layer must read
    `datatypes` as TensorRT spells them: in both operands, in the weight at least, or (`operands` "calibrated") in both
    where its activations are quantized.
    """

    name: str
    shown: str
    carrier: Literal["plugin", "moe_layer", "product"]
    datatypes: tuple[str, ...] = ()
    operands: Literal["both", "weight", "calibrated"] = "weight"


@dataclass(frozen=True)
class Lowering:
    """One way to compute a subgraph. FP8 has two, a plugin and Q/DQ nodes; every other decision has one.

    Attributes:
        description: for the header of plan files.
        capability: the attribute of `Capabilities` that it takes, "" for none; `lacking` says so where it is missing.
        serves: what it computes, products with "weights", "attention" over a cache, a "decoder"'s layer, whose parts
            have decisions of their own, or what was put in "by_hand".
        obstacle: why it cannot compute a subgraph that can be replaced.
        slow_on: why it is no good choice for a subgraph on a target, where a plan may still ask for it.
        op: the operator that replaces a subgraph, "" where none does.
        weights: the format that it quantizes weights to; "" for the model's own or another type of 16 bits.
        held: the format of weights that the model brought quantized ("nvfp4" where it has none), or of a layer's parts.
        recipe: the part of a recipe that applies to its NVFP4 weights.
        recipe_statistics: the kinds of statistics that this part needs.
        statistics: the kinds of statistics that it needs beside those of the recipe (see `statistics.collect`).
        ranges: whether it can use, or must have, the largest magnitudes of its inputs.
        lower: replaces the subgraph; returns the names of the nodes that compute it.
        functions: what the operators that it puts in compute, for an op and an operator set version.
        weight_bytes, arithmetic: bytes of a weight with its scales, or of a cached number (None: the model's own type),
            and the type that the tensor cores multiply in.
        activations: what its products read, with known ranges and without.
        layers: what verification looks for in the engine; None: nothing.
    """

    decision: Decision
    description: str
    lower: Callable[[LoweringContext, Subgraph], list[str]]
    capability: str = ""
    lacking: str = "{target} does not compute {decision}"
    serves: Literal["weights", "attention", "decoder", "by_hand"] = "weights"
    obstacle: Callable[[Subgraph], Reason | None] = lambda _: None
    slow_on: Callable[[Subgraph, Capabilities], Reason | None] = lambda *_: None
    op: Callable[[Subgraph], str] = lambda _: ""
    weights: Literal["nvfp4", "fp8", ""] = ""
    held: Literal["nvfp4", "fp8", ""] = ""
    recipe: Callable[[Recipe], Recipe] = lambda recipe: recipe
    recipe_statistics: Callable[[Recipe], frozenset[str]] = lambda recipe: recipe.needs
    statistics: frozenset[str] = frozenset()
    ranges: Literal["", "used", "required"] = ""
    functions: Callable[[str, int], list[onnx.FunctionProto]] = lambda *_: []
    weight_bytes: float | None = None
    arithmetic: str = ""
    activations: tuple[str, str] = ("as in the model", "as in the model")
    layers: EngineLayers | None = None

    @property
    def is_plugin(self) -> bool:
        """Whether a plugin computes it."""
        return self.layers is not None and self.layers.carrier == "plugin"

    @property
    def is_nvfp4_plugin(self) -> bool:
        """Whether a plugin with NVFP4 weights computes it."""
        return self.is_plugin and self.weights == "nvfp4"

    @property
    def scales_at_run_time(self) -> bool:
        """Whether activations of unknown range are quantized all the same."""
        return self.is_plugin and bool(self.ranges)

    def meets(self, require: str) -> bool:
        """Whether its weights are at least as small as `require`, "nvfp4" or "fp8", asks for."""
        return "nvfp4" in (self.weights, self.held) or require in (self.weights, self.held)

    def needs(self, recipe: Recipe) -> frozenset[str]:
        """The kinds of statistics that it needs of what its products read, where weights are made by `recipe`."""
        applied = self.recipe_statistics(self.recipe(recipe)) if self.weights == "nvfp4" else frozenset()
        return self.statistics | applied

    def missing_on(self, capabilities: Capabilities) -> Reason | None:
        """What the target lacks for it, whatever the subgraph."""
        if not self.capability or getattr(capabilities, self.capability):
            return None
        return Reason(ReasonCode.TARGET, self.lacking.format(target=capabilities.target, decision=self.decision))

    def unsupported(self, subgraph: Subgraph) -> Reason | None:
        """Why it cannot compute `subgraph`, whatever the target."""
        is_by_hand = subgraph.kind == "by_hand"
        if self.decision == Decision.KEEP and not is_by_hand:
            return None
        if subgraph.refusal is not None:
            return Reason(ReasonCode.NOT_REPLACEABLE, subgraph.refusal)
        if self.serves != (subgraph.kind if subgraph.kind in ("attention", "decoder", "by_hand") else "weights"):
            text = f"that is no decision for a subgraph of kind {subgraph.kind}"
            return Reason(ReasonCode.KIND_UNSUPPORTED, text)
        return self.obstacle(subgraph)


def _plugin_functions(op: str, opset: int) -> list[onnx.FunctionProto]:
    return [OPS[op].function(opset)]


_NVFP4_BYTES = 0.5 + 1 / 16  # 4 bits, and an E4M3 scale per 16 weights
_NVFP4_PLUGIN = EngineLayers("nvfp4", "nvfp4 plugin", "plugin")
_FP8_SCALED = "FP8, calibrated scales"

NVFP4_W4A4 = Lowering(
    Decision.NVFP4_W4A4,
    "NVFP4 weights and activations",
    partial(lower_nvfp4, quantize_activations=True),
    capability="nvfp4_w4a4",
    obstacle=nvfp4_obstacle,
    op=lambda subgraph: subgraph.op,
    weights="nvfp4",
    recipe_statistics=lambda recipe: recipe.needs | recipe.residual_needs,
    ranges="used",
    functions=_plugin_functions,
    weight_bytes=_NVFP4_BYTES,
    arithmetic="fp4",
    activations=("NVFP4, calibrated scales", "NVFP4, scales computed at run time"),
    layers=_NVFP4_PLUGIN,
)
NVFP4_MIXED = Lowering(
    Decision.NVFP4_MIXED,
    "MLPs: NVFP4 weights and, before gate and up, NVFP4 activations; 16-bit activations before down",
    lower_nvfp4_mixed,
    capability="nvfp4_w4a4",
    obstacle=mixed_obstacle,
    op=lambda _: MIXED_OP,
    weights="nvfp4",
    recipe_statistics=mixed_statistics,
    ranges="used",
    functions=_plugin_functions,
    weight_bytes=_NVFP4_BYTES,
    arithmetic="fp4",  # of gate and up; down decodes its weights
    activations=(
        "NVFP4 before gate and up, calibrated scales; as in the model before down",
        "NVFP4 before gate and up, scales computed at run time; as in the model before down",
    ),
    layers=EngineLayers("nvfp4_mixed", "nvfp4 plugins", "plugin"),
)
NVFP4_W4A16 = Lowering(
    Decision.NVFP4_W4A16,
    "NVFP4 weights, 16-bit activations",
    partial(lower_nvfp4, quantize_activations=False),
    capability="nvfp4_w4a16",
    obstacle=nvfp4_obstacle,
    op=lambda subgraph: subgraph.op,
    weights="nvfp4",
    recipe=Recipe.for_16_bit_activations,
    functions=_plugin_functions,
    weight_bytes=_NVFP4_BYTES,
    arithmetic="bf16",  # weights are decoded first
    layers=_NVFP4_PLUGIN,
)
NATIVE_NVFP4 = Lowering(
    Decision.NATIVE_NVFP4,
    "TensorRT's own NVFP4 layers",
    trt_nvfp4.lower_native_nvfp4,
    capability="native_nvfp4",
    obstacle=lambda subgraph: subgraph.k_obstacle("NVFP4") or trt_nvfp4.native_nvfp4_obstacle(subgraph),
    weights="nvfp4",
    ranges="required",
    functions=lambda *_: trt_nvfp4.functions(),
    weight_bytes=_NVFP4_BYTES,
    arithmetic="fp4",
    activations=("NVFP4, calibrated scales", "as in the model"),
    layers=EngineLayers("native_nvfp4", "native_nvfp4", "product", ("FP4E2M1", "FP4"), "both"),
)
NATIVE = Lowering(
    Decision.NATIVE,
    "TensorRT's own MoE layer",
    trt_moe.lower_native_moe,
    capability="native",
    lacking="TensorRT has no MoE layer for {target}",
    obstacle=trt_moe.native_obstacle,
    op=lambda _: trt_moe.OP,
    functions=lambda _, opset: [trt_moe.function(opset)],
    layers=EngineLayers("native", "native", "moe_layer"),
)


def _fp8_plugin_obstacle(subgraph: Subgraph) -> Reason | None:
    if subgraph.kind == "moe":
        return fp8_moe_obstacle(subgraph)
    return fp8_obstacle(subgraph) or fp8_mlp_obstacle(subgraph)


def _fp8_moe_is_slow(subgraph: Subgraph, capabilities: Capabilities) -> Reason | None:
    if subgraph.kind != "moe":
        return None
    of = ""
    if not capabilities.fp8_plugins:
        of = capabilities.target
    elif subgraph.dtype == "float32":
        of = "float32 activations"
    elif not subgraph.shapes["gated"]:
        of = "experts without a gate"
    return Reason(ReasonCode.NO_KERNELS, f"{FP8_MOE} has no kernels of its own for {of}") if of else None


FP8_PLUGIN = Lowering(
    Decision.FP8,
    "FP8: one plugin, or Q/DQ nodes",
    lambda context, subgraph: (lower_fp8_moe if subgraph.kind == "moe" else lower_fp8_mlp)(context, subgraph),
    capability="fp8",
    obstacle=_fp8_plugin_obstacle,
    slow_on=_fp8_moe_is_slow,
    op=lambda subgraph: FP8_MOE if subgraph.kind == "moe" else FP8_MLP,
    weights="fp8",
    ranges="used",
    functions=_plugin_functions,
    weight_bytes=1.0,  # a channel's scale is beneath notice
    arithmetic="fp8",
    activations=(_FP8_SCALED, "FP8, scales computed at run time"),
    layers=EngineLayers("fp8_plugin", "fp8 plugin", "plugin"),
)
FP8_QDQ = Lowering(
    Decision.FP8,
    "FP8: one plugin, or Q/DQ nodes",
    lower_fp8,
    capability="fp8",
    obstacle=fp8_obstacle,
    weights="fp8",
    ranges="used",
    weight_bytes=1.0,
    arithmetic="fp8",
    activations=(_FP8_SCALED, "as in the model (weights alone are FP8)"),
    layers=EngineLayers("fp8", "fp8", "product", ("FP8",), "calibrated"),
)
BF16 = Lowering(
    Decision.BF16,
    "BF16: Casts around the subgraph",
    partial(lower_half, to=ir.DataType.BFLOAT16),
    capability="bf16",
    obstacle=lambda subgraph: subgraph.mixed_types,
    weight_bytes=2.0,
    arithmetic="bf16",
    layers=EngineLayers("bf16", "bf16", "product", ("BFloat16", "BF16")),
)
FP16 = Lowering(
    Decision.FP16,
    "FP16: Casts around the subgraph",
    partial(lower_half, to=ir.DataType.FLOAT16),
    obstacle=lambda subgraph: subgraph.mixed_types,
    weight_bytes=2.0,
    arithmetic="bf16",
    layers=EngineLayers("fp16", "fp16", "product", ("Half", "FP16")),
)
ATTENTION = Lowering(
    Decision.ATTENTION,
    "attention over a cache: one plugin",
    partial(lower_attention, fp8_cache=False),
    capability="attention",
    serves="attention",
    op=lambda subgraph: subgraph.op,
    functions=_plugin_functions,
    layers=EngineLayers("attention", "attention plugin", "plugin"),
)
ATTENTION_FP8 = Lowering(
    Decision.ATTENTION_FP8,
    "the same with FP8 caches",
    partial(lower_attention, fp8_cache=True),
    capability="attention_fp8",
    serves="attention",
    op=lambda subgraph: subgraph.op,
    statistics=frozenset({"head_amax"}),
    functions=_plugin_functions,
    weight_bytes=1.0,
    layers=EngineLayers("attention_fp8", "attention plugin, FP8 caches", "plugin"),
)
DECODER = Lowering(
    Decision.DECODER,
    "a decoder's layer in one launch with those behind it that are equal; its parts stay nvfp4_w4a16 and attention",
    lambda *_: [],  # once its parts have been lowered: see `fuse_layers`
    serves="decoder",
    held="nvfp4",
    op=lambda subgraph: subgraph.op,
    functions=_plugin_functions,
    layers=EngineLayers("decoder", "decoder plugin", "plugin"),
)
BY_HAND = Lowering(
    Decision.BY_HAND,
    "a plugin node that the model brought, as it is",
    lambda _, subgraph: list(subgraph.nodes),
    serves="by_hand",
    op=lambda subgraph: subgraph.op,
    functions=_plugin_functions,
    layers=EngineLayers("by_hand", "plugin, put in by hand", "plugin"),
)
KEEP = Lowering(Decision.KEEP, "left as it is", lambda *_: [])

#: By decision, that of FP8 without a plugin (see `lowering_of`).
LOWERINGS: Mapping[Decision, Lowering] = MappingProxyType(
    {
        lowering.decision: lowering
        for lowering in (
            NVFP4_W4A4,
            NVFP4_MIXED,
            NVFP4_W4A16,
            NATIVE_NVFP4,
            NATIVE,
            FP8_QDQ,
            BF16,
            FP16,
            ATTENTION,
            ATTENTION_FP8,
            DECODER,
            BY_HAND,
            KEEP,
        )
    }
)
#: The operators that may replace subgraphs.
REPLACING_OPS = (*OPS, trt_moe.OP)


def lowering_of(decision: Decision, kind: str, op: str) -> Lowering:
    """The lowering of a plan's entry; an `op` that is none of the decision's is left from an edit and means nothing."""
    if decision == Decision.FP8 and (kind == "moe" or op == FP8_MLP):
        return FP8_PLUGIN
    if decision == Decision.BY_HAND:
        return replace(BY_HAND, held="fp8" if op.startswith("FP8") else "nvfp4")
    return LOWERINGS[decision]


def lowering_on(decision: Decision, subgraph: Subgraph, capabilities: Capabilities) -> Lowering:
    """The lowering that serves `subgraph` on a target: in FP8, the plugin where it has kernels of its own."""
    if decision == Decision.FP8:
        served = capabilities.fp8_plugins and subgraph.dtype != "float32" and fp8_mlp_obstacle(subgraph) is None
        return FP8_PLUGIN if subgraph.kind == "moe" or served else FP8_QDQ
    return LOWERINGS[decision]
