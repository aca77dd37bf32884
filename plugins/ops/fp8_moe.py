"""FP8MoE: a mixture of experts (moe.py) with E4M3 weights and activations."""

from __future__ import annotations

import torch
from torch import Tensor

from . import function_body as text
from .definition import Formal, Shape, ShapeRule
from .moe import ExpertFormat, moe_op
from .number_formats import BLOCK
from .reference import dequantize_e4m3, through_e4m3


def no_shared_expert(hidden: int, gated: int) -> dict[str, Shape]:
    """Shapes of the inputs of the smallest shared expert, by name: what a model without one gives as zeros."""
    rows = 2 * BLOCK if gated else BLOCK
    return {
        "shared_gate_up_weight": (rows, hidden),
        "shared_gate_up_scale": (rows,),
        "shared_gate_up_bias": (rows,),
        "shared_down_weight": (hidden, BLOCK),
        "shared_down_scale": (hidden,),
        "shared_down_bias": (hidden,),
        "shared_gate": (hidden,),
    }


def _check(rule: ShapeRule, projection: str, k: int, batch: Shape) -> int:
    n = rule.plain_weight(f"{projection}_weight", k, batch)
    rule.expect(f"{projection}_scale", (*batch, n))
    return n


def _seen(rows: Tensor, dtype: torch.dtype, given_scale: Tensor) -> Tensor:
    return through_e4m3(rows, given_scale)


FP8_MOE = moe_op(
    name="FP8MoE",
    doc="""NVFP4MoE's mixture of E experts in E4M3: the same routing and sum; weights with a scale per channel, x and
the hidden activations with one scale each, e4m3(x / scale), as in FP8GatedMLP. A scale that is computed at run time is
that of all rows that the routed experts see, and another one that of the shared expert's.""",
    weights=(
        Formal("gate_up_weight", "tensor(int8)", "[E, N1, H] E4M3 bytes; N1 = 2I if gated, alternating, else I"),
        Formal("gate_up_scale", "tensor(float)", "[E, N1] multipliers"),
        Formal("gate_up_bias", "T", "[E, N1]"),
        Formal("down_weight", "tensor(int8)", "[E, H, I] E4M3 bytes, I a multiple of 16"),
        Formal("down_scale", "tensor(float)", "[E, H] multipliers"),
        Formal("down_bias", "T", "[E, H]"),
        Formal("shared_gate_up_weight", "tensor(int8)", "[S1, H] E4M3 bytes; S1 = 2S alternating if gated, else S"),
        Formal("shared_gate_up_scale", "tensor(float)", "[S1] multipliers"),
        Formal("shared_gate_up_bias", "T", "[S1]"),
        Formal(
            "shared_down_weight", "tensor(int8)", "[H, S] E4M3 bytes, S a multiple of 16; the smallest if shared is 0"
        ),
        Formal("shared_down_scale", "tensor(float)", "[H] multipliers"),
        Formal("shared_down_bias", "T", "[H]"),
    ),
    scales=(
        Formal("input_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
        Formal("hidden_scale", "tensor(float)", "[]; 0: amax / 448, computed at run time"),
    ),
    experts=ExpertFormat(
        parts=("weight", "scale"),
        values_per_byte=1,
        scales=("input_scale", "hidden_scale"),
        weight=dequantize_e4m3,
        seen=_seen,
        constants=text.e4m3_constants(),
        weight_onnx=text.dequantize_e4m3,
        seen_onnx=text.through_e4m3,
        check=_check,
    ),
    flags={},
)
