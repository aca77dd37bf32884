"""NVFP4GatedMLP: a gated MLP (gated_mlp.py) with NVFP4 weights."""

from trt_nvfp4.plugins.ops.definition import Formal
from trt_nvfp4.plugins.ops.gated_mlp import gated_mlp_op
from trt_nvfp4.plugins.ops.weight_format import NVFP4

NVFP4_GATED_MLP = gated_mlp_op(
    name="NVFP4GatedMLP",
    doc="""y = down(act(gate(x)) * up(x)). Row 2i of gate_up is row i of gate, row 2i+1 row i of up; the biases alike.
Computed in float32; the hidden activations are rounded to x's type, or with quantize_activations to NVFP4, as x is;
behind both stands what that loses of their last R = residual_channels.""",
    weights=(
        Formal("gate_up_weight", "tensor(int8)", "[2I, (K + R)/2] E2M1, two per byte, even element in the low nibble"),
        Formal("gate_up_scales", "tensor(int8)", "[ceil(2I/128)*128, ceil((K + R)/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("gate_up_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("gate_up_bias", "T", "[2I]"),
        Formal("down_weight", "tensor(int8)", "[H, (I + R)/2], I a multiple of 16"),
        Formal("down_scales", "tensor(int8)", "[ceil(H/128)*128, ceil((I + R)/16/4)*4] E4M3 bytes, 128x4 tiled"),
        Formal("down_tensor_scale", "tensor(float)", "[] multiplier"),
        Formal("down_bias", "T", "[H]"),
    ),
    fmt=NVFP4,
)
