"""NVFP4MoE: a mixture of experts (moe.py) with NVFP4 weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import function_body as text
from .definition import Formal, Shape, ShapeRule
from .moe import ExpertFormat, moe_op
from .number_formats import BLOCK, tiled_shape
from .reference import dequantize_weight, gemm_input


def no_shared_expert(hidden: int, gated: int) -> dict[str, Shape]:
    """Shapes of the inputs of the smallest shared expert, by name: what a model without one gives as zeros."""
    rows = 2 * BLOCK if gated else BLOCK
    return {
        "shared_gate_up_weight": (rows, hidden // 2),
        "shared_gate_up_scales": tiled_shape(rows, hidden // BLOCK),
        "shared_gate_up_tensor_scale": (),
        "shared_gate_up_bias": (rows,),
        "shared_down_weight": (hidden, BLOCK // 2),
        "shared_down_scales": tiled_shape(hidden, 1),
        "shared_down_tensor_scale": (),
        "shared_down_bias": (hidden,),
        "shared_gate": (hidden,),
    }


def _check(rule: ShapeRule, projection: str, k: int, batch: Shape) -> int:
    n = rule.weight(f"{projection}_weight", f"{projection}_scales", k, batch)
    rule.expect(f"{projection}_tensor_scale", batch)
    return n


def _seen(rows: Tensor, dtype: torch.dtype, given_scale: Tensor, quantize_activations: int) -> Tensor:
    return gemm_input(rows, dtype, quantize_activations, given_scale)


_WEIGHTS = (
    Formal("gate_up_weight", "tensor(int8)", "[E, N1, H/2] E2M1, two per byte; N1 = 2I if gated, else I"),
    Formal("gate_up_scales", "tensor(int8)", "[E, ceil(N1/128)*128, ceil(H/16/4)*4] E4M3 bytes, each 128x4 tiled"),
    Formal("gate_up_tensor_scale", "tensor(float)", "[E] multipliers"),
    Formal("gate_up_bias", "T", "[E, N1]"),
    Formal("down_weight", "tensor(int8)", "[E, H, I/2], I a multiple of 16"),
    Formal("down_scales", "tensor(int8)", "[E, ceil(H/128)*128, ceil(I/16/4)*4] E4M3 bytes, each 128x4 tiled"),
    Formal("down_tensor_scale", "tensor(float)", "[E] multipliers"),
    Formal("down_bias", "T", "[E, H]"),
    Formal("shared_gate_up_weight", "tensor(int8)", "[S1, H/2]; S1 = 2S alternating if gated, else S"),
    Formal("shared_gate_up_scales", "tensor(int8)", "[ceil(S1/128)*128, ceil(H/16/4)*4] E4M3 bytes, 128x4 tiled"),
    Formal("shared_gate_up_tensor_scale", "tensor(float)", "[] multiplier"),
    Formal("shared_gate_up_bias", "T", "[S1]"),
    Formal("shared_down_weight", "tensor(int8)", "[H, S/2], S a multiple of 16; the smallest if shared is 0"),
    Formal("shared_down_scales", "tensor(int8)", "[ceil(H/128)*128, ceil(S/16/4)*4] E4M3 bytes, 128x4 tiled"),
    Formal("shared_down_tensor_scale", "tensor(float)", "[] multiplier"),
    Formal("shared_down_bias", "T", "[H]"),
)

NVFP4_MOE = moe_op(
    name="NVFP4MoE",
    doc="""A mixture of E experts. Each row of x goes to the top_k experts of the highest keys; a key is the expert's
score + correction_bias, ties go to the lower index, and a logit that is NaN counts as the lowest float32. scoring 0:
scores are the softmax of the logits; 1: their sigmoid; 2 and 3: the logits, and the softmax or sigmoid of the chosen
ones weighs them. With n_group > 1 only the topk_group groups of neighbouring experts whose group_score_top best keys
have the largest sums are open. An expert's weight is its score (without the bias), with renormalize divided by the sum
of the chosen ones + 1e-20, times scaling_factor. y = sum of weight * expert(x) in order of rank, float32, + the shared
expert (shared 1), * sigmoid(x . shared_gate) (shared_gated 1); with scale_input the weight scales the expert's input
instead. expert(x) = down(act(gate(x)) * up(x)) or, gated 0, down(act(up(x))); hidden activations are rounded to x's
type, or with quantize_activations to NVFP4, as x is. E is at most 1024, top_k at most 64.""",
    weights=_WEIGHTS,
    scales=(
        Formal("input_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
        Formal("hidden_tensor_scale", "tensor(float)", "[]; 0: computed at run time"),
    ),
    experts=ExpertFormat(
        parts=("weight", "scales", "tensor_scale"),
        values_per_byte=2,
        scales=("input_tensor_scale", "hidden_tensor_scale"),
        weight=dequantize_weight,
        seen=_seen,
        constants=text.constants(),
        weight_onnx=text.dequantize_weight,
        seen_onnx=partial(text.gemm_input, type_of="x"),
        check=_check,
    ),
    flags={"quantize_activations": 0},
)
