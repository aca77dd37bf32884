"""FP8MoE: a mixture of experts (moe.py) with E4M3 weights and activations."""

from trt_nvfp4.plugins.ops.definition import Formal
from trt_nvfp4.plugins.ops.moe import moe_op
from trt_nvfp4.plugins.ops.weight_format import E4M3

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
    fmt=E4M3,
)
