"""The ops of the ONNX domain `trt_nvfp4`, each defined once: schema, function body, Torch reference, shape rules."""

from trt_nvfp4.plugins.ops.activation import GATED_ONLY, Activation
from trt_nvfp4.plugins.ops.cached_attention import CACHED_ATTENTION
from trt_nvfp4.plugins.ops.definition import DOMAIN, VERSION, Formal, OpDefinition, OpError
from trt_nvfp4.plugins.ops.fp8_gated_mlp import FP8_GATED_MLP
from trt_nvfp4.plugins.ops.fp8_moe import FP8_MOE
from trt_nvfp4.plugins.ops.nvfp4_decoder import NVFP4_DECODER
from trt_nvfp4.plugins.ops.nvfp4_gated_mlp import NVFP4_GATED_MLP
from trt_nvfp4.plugins.ops.nvfp4_linear import NVFP4_LINEAR
from trt_nvfp4.plugins.ops.nvfp4_moe import NVFP4_MOE
from trt_nvfp4.plugins.ops.nvfp4_moe_decoder import NVFP4_MOE_DECODER
from trt_nvfp4.plugins.ops.nvfp4_persistent_mlp import NVFP4_PERSISTENT_MLP
from trt_nvfp4.plugins.ops.nvfp4_quantize import NVFP4_QUANTIZE
from trt_nvfp4.plugins.ops.standard import STANDARD_OPS, StandardOp

OPS = {
    op.name: op
    for op in (
        NVFP4_QUANTIZE,
        NVFP4_LINEAR,
        NVFP4_GATED_MLP,
        NVFP4_PERSISTENT_MLP,
        NVFP4_MOE,
        FP8_GATED_MLP,
        FP8_MOE,
        CACHED_ATTENTION,
        NVFP4_DECODER,
        NVFP4_MOE_DECODER,
    )
}

__all__ = [
    "DOMAIN",
    "GATED_ONLY",
    "OPS",
    "STANDARD_OPS",
    "VERSION",
    "Activation",
    "Formal",
    "OpDefinition",
    "OpError",
    "StandardOp",
]
