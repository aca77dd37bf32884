"""FP8GatedMLP: a gated MLP (gated_mlp.py) with E4M3 weights and activations."""

from trt_nvfp4.plugins.ops.definition import Formal
from trt_nvfp4.plugins.ops.gated_mlp import gated_mlp_op
from trt_nvfp4.plugins.ops.weight_format import E4M3

FP8_GATED_MLP = gated_mlp_op(
    name="FP8GatedMLP",
    doc="""y = down(act(gate(x)) * up(x)) in E4M3: weights with a scale per channel, x and the hidden activations with
one scale each, e4m3(x / scale). Row 2i of gate_up is row i of gate, row 2i+1 row i of up; the biases alike. Sums in
float32, or in the tensor cores' FP8 accumulators, which keep fewer bits.""",
    weights=(
        Formal("gate_up_weight", "tensor(int8)", "[2I, K] E4M3 bytes"),
        Formal("gate_up_scale", "tensor(float)", "[2I] multipliers"),
        Formal("gate_up_bias", "T", "[2I]"),
        Formal("down_weight", "tensor(int8)", "[H, I] E4M3 bytes, I a multiple of 16"),
        Formal("down_scale", "tensor(float)", "[H] multipliers"),
        Formal("down_bias", "T", "[H]"),
    ),
    fmt=E4M3,
)
