"""Run as a program under compute-sanitizer: every op once in a type, small odd shapes, in memory that nothing wrote
before.

Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of exactly its size.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import op_inputs
import torch
from attention_cases import SHAPES
from attention_cases import inputs as attention_inputs
from decoder_cases import MIXTURES, random_case
from decoder_cases import SHAPES as DECODERS
from recurrent_cases import (
    CAUSAL_CONV,
    CHUNKS,
    CONVOLUTIONS,
    LINEAR_ATTENTION,
    SMALL,
    convolution_inputs,
    linear_attention_inputs,
)

from trt_nvfp4.plugins.host import PluginHost

GENERIC, AUTOMATIC, W4A16_SM90 = 1, 0, 8


def calls(dtype: torch.dtype) -> Iterator[tuple[str, list[torch.Tensor], dict[str, Any]]]:
    """(op, inputs, attributes)"""
    rng = np.random.default_rng()
    for w4a4 in (0, 1):
        quantized = {"quantize_activations": w4a4}
        for m, n, k in ((1, 5, 16), (66, 77, 144)):
            yield "NVFP4Linear", op_inputs.linear(rng, m, n, k, dtype).inputs, {"activation": 3, **quantized}
        yield "NVFP4GatedMLP", op_inputs.gated_mlp(rng, 3, 48, 80, 33, dtype).inputs, {"activation": 7, **quantized}
        for gated in (0, 1):
            case = op_inputs.persistent_mlp(rng, 2, 5, 64, 48, 64, dtype, gated=gated)
            yield "NVFP4PersistentMLP", case.inputs, {"activation": 5, "gated": gated, **quantized}
        for m in (1, 30, 60, 90):  # of 5 experts: one token, jobs by mma.sync, wide ones, wider ones
            shared = {"shared": 1, "shared_gated": 1, "renormalize": 1}
            yield "NVFP4MoE", op_inputs.moe(rng, m, 96, 32, 5, dtype, s=64).inputs, {"top_k": 2, **shared, **quantized}
    for m, scales in ((3, (0, 0)), (130, (0.01, 0.02))):
        inputs = op_inputs.fp8_gated_mlp(rng, m, 272, 208, 136, dtype, scales).inputs
        yield "FP8GatedMLP", inputs, {"activation": 5, "static_scales": int(scales[0] != 0)}
    for m, scales in ((3, (0, 0)), (70, (0.01, 0.02))):
        inputs = op_inputs.fp8_moe(rng, m, 144, 80, 5, dtype, scales, s=64).inputs
        attributes = {"top_k": 2, "shared": 1, "shared_gated": 1, "static_scales": int(scales[0] != 0)}
        yield "FP8MoE", inputs, attributes
    for shape in SHAPES:
        for fp8 in (False, True):
            yield "CachedAttention", attention_inputs(rng, shape, dtype, fp8), shape.attributes(fp8)
    if dtype != torch.float32:
        for layers in (*DECODERS, *MIXTURES):
            for fp8 in (False, True):
                yield layers.op, random_case(rng, layers, dtype, fp8).inputs, layers.attributes(fp8)
    for recurrent in (*SMALL, *CHUNKS):
        yield LINEAR_ATTENTION, linear_attention_inputs(rng, recurrent, dtype), recurrent.attributes
    for convolution in CONVOLUTIONS:
        yield CAUSAL_CONV, convolution_inputs(rng, convolution, dtype, 4), {"activation": "silu", "ndim": 1}
    for norm in (0, 1):
        yield "NVFP4Quantize", op_inputs.quantize(rng, 131, 80, dtype).inputs, {"norm": norm, "add_residual": norm}


def tactics(
    host: PluginHost, op: str, inputs: list[torch.Tensor], attributes: dict[str, Any], dtype: torch.dtype
) -> list[int]:
    """Of a call; sanitize_w4a16.py has W4A16's of linears and MLPs."""
    of_sm90 = torch.cuda.get_device_capability() == (9, 0) and dtype != torch.float32
    if "Decoder" in op or op == LINEAR_ATTENTION:
        with host.session(op, inputs, attributes) as session:
            return session.tactics or [AUTOMATIC]
    mixture = op == "NVFP4MoE" and not attributes["quantize_activations"]
    return [GENERIC, AUTOMATIC, *([W4A16_SM90] if of_sm90 and mixture else [])]


def main(library: str, dtype: torch.dtype) -> None:
    host = PluginHost(library)
    for op, tensors, attributes in calls(dtype):
        inputs = [x.cuda() for x in tensors]
        for tactic in tactics(host, op, inputs, attributes, dtype):
            with host.session(op, inputs, attributes, tactic=tactic) as session:
                types_and_shapes = zip(session.output_dtypes, session.output_shapes(inputs), strict=True)
                outputs = [torch.empty(shape, dtype=kind, device="cuda") for kind, shape in types_and_shapes]
                workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
                session.enqueue(inputs, outputs, workspace)
                torch.cuda.synchronize()
                # Reads every output: initcheck sees what was left unwritten.
                for y in outputs:
                    y.cpu()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("library")
    arguments.add_argument("dtype", choices=["float16", "bfloat16", "float32"])
    parsed = arguments.parse_args()
    main(parsed.library, getattr(torch, parsed.dtype))
