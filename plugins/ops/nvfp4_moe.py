"""NVFP4MoE: a mixture of experts (moe.py) with NVFP4 weights."""

from trt_nvfp4.plugins.ops.definition import Formal
from trt_nvfp4.plugins.ops.moe import moe_op
from trt_nvfp4.plugins.ops.weight_format import NVFP4

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
ones weighs them; 4: sqrt(softplus(logit)); 5: the logits, which are the weights themselves, but that -inf, NaN and the
lowest float32 weigh 0: fewer than top_k experts may be given. With n_group > 1 only the topk_group groups of
neighbouring experts whose group_score_top best keys have the largest sums are open. An expert's weight is its score
(without the bias), with renormalize divided by the sum of the chosen ones + 1e-20, times scaling_factor. y = sum of
weight * expert(x) in order of rank, float32, + the shared expert (shared 1), * sigmoid(x . shared_gate) (shared_gated
1); with scale_input the weight scales the expert's input instead. expert(x) = down(act(gate(x)) * up(x)) or, gated 0,
down(act(up(x))); hidden activations are rounded to x's type, or with quantize_activations to NVFP4, as x is. E is at
most 1024, top_k at most 64.""",
    weights=_WEIGHTS,
    fmt=NVFP4,
)
