"""How many tokens NVFP4 weights with 16-bit activations (W4A16) are fast for."""

from __future__ import annotations

from trt_nvfp4.graph_passes.subgraphs.types import Subgraph

#: W4A16 decodes the weights again for every 32 tokens, on Hopper for every 64: with more tokens than these, 16-bit
#: weights are faster (docs/figures/roofline.md; on an H200, benchmarks/results/models/vla.json).
MOST_W4A16_TOKENS = 128
# Against FP8: with W4A16 half as much is read and products are half as fast. Measured on an
# H200 (benchmarks/results/kernels/nvfp4_or_fp8.json).
_MLP_TOKENS = 32
# An expert's tokens count, and those of a call, whose weights are read again beyond so many.
_MOE_TOKENS, _EXPERT_TOKENS = 256, 40
# Where scales of activations are found at run time, which takes FP8 a third matrix product.
_UNCALIBRATED = 2


def most_decode_tokens(subgraph: Subgraph, calibrated: bool) -> int:
    """The most rows of input at which W4A16 is about as fast as FP8 or faster; `calibrated`: FP8 has scales of
    activations."""
    most = _MLP_TOKENS
    if subgraph.kind == "moe":
        most = min(_MOE_TOKENS, _EXPERT_TOKENS * subgraph.shapes["experts"] // subgraph.shapes["top_k"])
    return most if calibrated else _UNCALIBRATED * most
