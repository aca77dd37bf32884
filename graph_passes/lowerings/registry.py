"""Every way to compute a subgraph: what it asks of target, subgraph and statistics, what it becomes, what it costs, and
how a built engine shows it. A decision is defined here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import onnx
import onnx_ir as ir

from trt_nvfp4.calibration.recipes import Recipe
from trt_nvfp4.graph_passes.lowerings import tensorrt_nvfp4, trt_moe
from trt_nvfp4.graph_passes.lowerings.attention import lower_attention
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.lowerings.decoder_layer import fuse_layers
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import OP as FP8_MOE
from trt_nvfp4.graph_passes.lowerings.fp8_moe_plugin import lower_fp8_moe, slow_fp8_moe, unsupported_fp8_moe
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import OP as FP8_MLP
from trt_nvfp4.graph_passes.lowerings.fp8_plugin import lower_fp8_mlp, unsupported_fp8_mlp
from trt_nvfp4.graph_passes.lowerings.fp8_qdq import lower_fp8, unsupported_fp8
from trt_nvfp4.graph_passes.lowerings.half import lower_half
from trt_nvfp4.graph_passes.lowerings.lowering import EngineLayers, Form, Lowering
from trt_nvfp4.graph_passes.lowerings.nvfp4_mixed import OP as MIXED_OP
from trt_nvfp4.graph_passes.lowerings.nvfp4_mixed import lower_nvfp4_mixed, mixed_statistics
from trt_nvfp4.graph_passes.lowerings.nvfp4_moe_plugin import lower_nvfp4_moe
from trt_nvfp4.graph_passes.lowerings.nvfp4_plugin import lower_nvfp4_linear, lower_nvfp4_mlps, unsupported_nvfp4
from trt_nvfp4.graph_passes.lowerings.recurrent import lower_to_definition
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph
from trt_nvfp4.graph_passes.subgraphs.by_hand import ByHandSubgraph
from trt_nvfp4.graph_passes.subgraphs.decoder_layer import DecoderLayerSubgraph
from trt_nvfp4.graph_passes.subgraphs.products import (
    GatedMlpSubgraph,
    LinearSubgraph,
    MlpSubgraph,
    MoeSubgraph,
    ProductSubgraph,
)
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason
from trt_nvfp4.graph_passes.subgraphs.recurrent import OP as RECURRENCE
from trt_nvfp4.graph_passes.subgraphs.recurrent import RecurrentSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops import OPS

_MLPS: tuple[type[Subgraph], ...] = (GatedMlpSubgraph, MlpSubgraph)
_DENSE = (*_MLPS, LinearSubgraph)
_PRODUCTS = (MoeSubgraph, *_DENSE)
#: What may stay as it is.
_KEPT = (*_PRODUCTS, AttentionSubgraph, DecoderLayerSubgraph)


def _forms(*forms: tuple[Form, tuple[type[Subgraph], ...]]) -> Mapping[str, Form]:
    return MappingProxyType({kind.kind: form for form, kinds in forms for kind in kinds})


def _own_op(subgraph: Subgraph) -> str:
    return subgraph.op


def _own_nodes(_: object, subgraph: Subgraph) -> list[str]:
    return list(subgraph.nodes)


def _plugin_functions(op: str, opset: int) -> list[onnx.FunctionProto]:
    return [OPS[op].function(opset)]


_NVFP4_BYTES = 0.5 + 1 / 16  # 4 bits, and an E4M3 scale per 16 weights
_NVFP4_PLUGIN = EngineLayers("nvfp4", "nvfp4 plugin", "plugin")
_FP8_SCALED = "FP8, calibrated scales"


def _nvfp4_forms(quantize_activations: bool) -> Mapping[str, Form]:
    def form(lower: Callable[..., list[str]]) -> Form:
        return Form(partial(lower, quantize_activations=quantize_activations), _own_op, unsupported_nvfp4)

    return _forms(
        (form(lower_nvfp4_moe), (MoeSubgraph,)),
        (form(lower_nvfp4_mlps), _MLPS),
        (form(lower_nvfp4_linear), (LinearSubgraph,)),
    )


def _half_forms(to: ir.DataType) -> Mapping[str, Form]:
    def unsupported(subgraph: ProductSubgraph) -> Reason | None:
        return subgraph.mixed_types

    return _forms((Form(partial(lower_half, to=to), unsupported=unsupported), _PRODUCTS))


def _attention_forms(fp8_cache: bool) -> Mapping[str, Form]:
    return _forms((Form(partial(lower_attention, fp8_cache=fp8_cache), _own_op), (AttentionSubgraph,)))


NVFP4_W4A4 = Lowering(
    Decision.NVFP4_W4A4,
    "NVFP4 weights and activations",
    _nvfp4_forms(quantize_activations=True),
    capability="nvfp4_w4a4",
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
    _forms((Form(lower_nvfp4_mixed, MIXED_OP, unsupported_nvfp4), _MLPS)),
    capability="nvfp4_w4a4",
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
    _nvfp4_forms(quantize_activations=False),
    capability="nvfp4_w4a16",
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
    _forms((Form(tensorrt_nvfp4.lower, unsupported=tensorrt_nvfp4.unsupported), _DENSE)),
    capability="native_nvfp4",
    weights="nvfp4",
    ranges="required",
    functions=lambda *_: tensorrt_nvfp4.functions(),
    weight_bytes=_NVFP4_BYTES,
    arithmetic="fp4",
    activations=("NVFP4, calibrated scales", "as in the model"),
    layers=EngineLayers("native_nvfp4", "native_nvfp4", "product", ("FP4E2M1", "FP4"), "both"),
)
TRT_MOE = Lowering(
    Decision.TRT_MOE,
    "TensorRT's own MoE layer",
    _forms((Form(trt_moe.lower, trt_moe.OP, trt_moe.unsupported), (MoeSubgraph,))),
    capability="trt_moe",
    unsupported_text="TensorRT has no MoE layer for {target}",
    functions=lambda _, opset: [trt_moe.function(opset)],
    layers=EngineLayers("trt_moe", "trt_moe", "trt_moe"),
)

FP8_PLUGIN = Lowering(
    Decision.FP8,
    "FP8: one plugin, or Q/DQ nodes",
    _forms(
        (Form(lower_fp8_moe, FP8_MOE, unsupported_fp8_moe, slow_fp8_moe), (MoeSubgraph,)),
        (Form(lower_fp8_mlp, FP8_MLP, unsupported_fp8_mlp), (GatedMlpSubgraph,)),
    ),
    capability="fp8",
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
    _forms((Form(lower_fp8, unsupported=unsupported_fp8), _DENSE)),
    capability="fp8",
    weights="fp8",
    ranges="used",
    weight_bytes=1.0,
    arithmetic="fp8",
    activations=(_FP8_SCALED, "as in the model (only weights are FP8)"),
    layers=EngineLayers("fp8", "fp8", "product", ("FP8",), "calibrated"),
)
BF16 = Lowering(
    Decision.BF16,
    "BF16: Casts around the subgraph",
    _half_forms(ir.DataType.BFLOAT16),
    capability="bf16",
    weight_bytes=2.0,
    arithmetic="bf16",
    layers=EngineLayers("bf16", "bf16", "product", ("BFloat16", "BF16")),
)
FP16 = Lowering(
    Decision.FP16,
    "FP16: Casts around the subgraph",
    _half_forms(ir.DataType.FLOAT16),
    weight_bytes=2.0,
    arithmetic="bf16",
    layers=EngineLayers("fp16", "fp16", "product", ("Half", "FP16")),
)
ATTENTION = Lowering(
    Decision.ATTENTION,
    "attention over a cache: one plugin",
    _attention_forms(fp8_cache=False),
    capability="attention",
    functions=_plugin_functions,
    layers=EngineLayers("attention", "attention plugin", "plugin"),
)
ATTENTION_FP8 = Lowering(
    Decision.ATTENTION_FP8,
    "the same with FP8 caches",
    _attention_forms(fp8_cache=True),
    capability="attention_fp8",
    statistics=frozenset({"head_amax"}),
    functions=_plugin_functions,
    weight_bytes=1.0,
    layers=EngineLayers("attention_fp8", "attention plugin, FP8 caches", "plugin"),
)
DECODER = Lowering(
    Decision.DECODER,
    "a decoder layer, fused with the following identical ones; its parts stay nvfp4_w4a16 and attention",
    _forms((Form(op=_own_op, fuse=fuse_layers), (DecoderLayerSubgraph,))),
    held="nvfp4",
    functions=_plugin_functions,
    layers=EngineLayers("decoder", "decoder plugin", "plugin"),
)
RECURRENT = Lowering(
    Decision.RECURRENT,
    "a recurrence over a state: one plugin, which is ONNX's own operator",
    _forms((Form(_own_nodes, _own_op), (RecurrentSubgraph,))),
    layers=EngineLayers("recurrent", "recurrence plugin", "plugin"),
)
BY_HAND = Lowering(
    Decision.BY_HAND,
    "a plugin node that the model brought, as it is",
    _forms((Form(_own_nodes, _own_op), (ByHandSubgraph,))),
    functions=_plugin_functions,
    layers=EngineLayers("by_hand", "plugin, put in by hand", "plugin"),
)
KEEP = Lowering(
    Decision.KEEP,
    "left as it is; a recurrence token by token, as ONNX defines it",
    _forms((Form(), _KEPT), (Form(lower_to_definition), (RecurrentSubgraph,))),
)

#: By decision, that of FP8 without a plugin (see `lowering_of`).
LOWERINGS: Mapping[Decision, Lowering] = MappingProxyType(
    {
        lowering.decision: lowering
        for lowering in (
            NVFP4_W4A4,
            NVFP4_MIXED,
            NVFP4_W4A16,
            NATIVE_NVFP4,
            TRT_MOE,
            FP8_QDQ,
            BF16,
            FP16,
            ATTENTION,
            ATTENTION_FP8,
            DECODER,
            RECURRENT,
            BY_HAND,
            KEEP,
        )
    }
)
#: The operators that may replace subgraphs.
REPLACING_OPS = (*OPS, trt_moe.OP, RECURRENCE)


def lowering_of(decision: Decision, kind: str, op: str) -> Lowering:
    """The lowering of a plan's entry. An edit may leave an `op` that is not the decision's, which is ignored."""
    if decision == Decision.FP8 and (kind not in FP8_QDQ.forms or op == FP8_MLP):
        return FP8_PLUGIN
    if decision == Decision.BY_HAND:
        return replace(BY_HAND, held="fp8" if op.startswith("FP8") else "nvfp4")
    return LOWERINGS[decision]


def lowering_on(decision: Decision, subgraph: Subgraph, capabilities: Capabilities) -> Lowering:
    """The lowering that computes `subgraph` on a target: in FP8, the plugin where it has kernels of its own."""
    if decision != Decision.FP8:
        return LOWERINGS[decision]
    if subgraph.kind not in FP8_QDQ.forms:
        return FP8_PLUGIN
    served = capabilities.fp8_plugins and subgraph.dtype != "float32" and FP8_PLUGIN.unsupported(subgraph) is None
    return FP8_PLUGIN if served else FP8_QDQ
