"""Operators of ONNX's own that the plugin library serves: TensorRT's parser looks plugins of their names up.

Schema, function body and semantics are ONNX's (opset 27); what lies here is what the adapters need of them, and a Torch
reference of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from trt_nvfp4.plugins.ops.definition import Formal

OPSET = 27
UPDATE_RULES = ("linear", "gated", "delta", "gated_delta")
CONV_ACTIVATIONS = ("none", "silu", "swish")


@dataclass(frozen=True)
class StandardOp:
    """An operator of the domain "" as its plugin takes it: the first `required` inputs, then the others in order.

    `attributes` maps the fields that TensorRT's parser passes to their defaults; those of strings have `choices`.
    """

    name: str
    doc: str
    inputs: tuple[Formal, ...]
    required: int
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, int | float | str]
    reference: Callable[..., tuple[Tensor, Tensor]]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def range_of(self, attribute: str) -> tuple[int, int]:
        """The smallest and the largest value of an int attribute."""
        return self.ranges[attribute]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The operator in Torch, token by token, in float64 if the inputs are, else in float32: output, present_state."""
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, tokens, _ = query.shape
    q, k, v = (
        x.to(wide).view(batch, tokens, heads, x.shape[-1] // heads)
        for x, heads in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    group = q_num_heads // kv_num_heads
    state = q.new_zeros(batch, kv_num_heads, k.shape[-1], v.shape[-1]) if past_state is None else past_state.to(wide)
    outputs = [q.new_zeros(batch, 0, q_num_heads, v.shape[-1])]
    for t in range(tokens):
        update = v[:, t]
        if "gated" in update_rule and decay is not None:
            state = state * decay[:, t].to(wide).view(batch, kv_num_heads, -1, 1).exp()
        if "delta" in update_rule and beta is not None:
            recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            update = beta[:, t].to(wide).view(batch, -1, 1) * (update - recalled)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        read = torch.einsum("bhkv,bhk->bhv", state.repeat_interleave(group, 1), q[:, t])
        outputs.append((read * (scale or k.shape[-1] ** -0.5))[:, None])
    y = torch.cat(outputs, 1).flatten(2).to(query.dtype)
    return y, state.to(query.dtype if past_state is None else past_state.dtype)


def causal_conv_with_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: str = "none",
    ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    """The operator in Torch, in float64 where the inputs are, else in float32: output, present_state."""
    wide = torch.promote_types(x.dtype, torch.float32)
    channels, _, width = weight.shape
    past = x.new_zeros(x.shape[0], channels, width - 1) if past_state is None else past_state
    padded = torch.cat((past, x), -1)
    if x.shape[-1] == 0:
        return x.clone(), padded
    y = functional.conv1d(padded.to(wide), weight.to(wide), None if bias is None else bias.to(wide), groups=channels)
    if activation != "none":
        y = functional.silu(y)
    return y.to(x.dtype), padded[..., padded.shape[-1] - (width - 1) :]


LINEAR_ATTENTION = StandardOp(
    name="LinearAttention",
    doc="""S = exp(decay) S (rules gated and gated_delta); u = v, or beta (v - S' k) (delta and gated_delta);
S = S + k u'; y = scale S' q, per KV head with a state S [d_k, d_v], computed in float32. Each KV head serves
q_num_heads / kv_num_heads query heads. A token with decay 0, k 0 and beta 0 leaves the state as it is: padding is
written so in the graph. Tokens may be 0. Present and past state may lie at one address.""",
    inputs=(
        Formal("query", "T", "[batch, tokens, q_num_heads d_k]"),
        Formal("key", "T", "[batch, tokens, kv_num_heads d_k]"),
        Formal("value", "T", "[batch, tokens, kv_num_heads d_v]"),
        Formal("past_state", "S", "[batch, kv_num_heads, d_k, d_v]; absent: zeros"),
        Formal("decay", "T", "[batch, tokens, kv_num_heads] or [batch, tokens, kv_num_heads d_k], a logarithm"),
        Formal("beta", "T", "[batch, tokens, kv_num_heads] or [batch, tokens, 1]"),
    ),
    required=3,
    outputs=(
        Formal("output", "T", "[batch, tokens, q_num_heads d_v]"),
        Formal("present_state", "S", "[batch, kv_num_heads, d_k, d_v]"),
    ),
    attributes={"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "gated_delta", "scale": 0.0, "chunk_size": 64},
    reference=linear_attention,
    choices={"update_rule": UPDATE_RULES},
    ranges={"q_num_heads": (1, 65535), "kv_num_heads": (1, 65535), "chunk_size": (0, 2**31 - 1)},
)

CAUSAL_CONV_WITH_STATE = StandardOp(
    name="CausalConvWithState",
    doc="""Each channel's causal convolution over what came before and the new tokens, then SiLU (activation silu or
swish). The state is the last k - 1 values of a channel. Present and past state may lie at one address.""",
    inputs=(
        Formal("input", "T", "[batch, channels, tokens]"),
        Formal("weight", "T", "[channels, 1, k]"),
        Formal("bias", "T", "[channels]; absent: zeros"),
        Formal("past_state", "T", "[batch, channels, k - 1]; absent: zeros"),
    ),
    required=2,
    outputs=(
        Formal("output", "T", "[batch, channels, tokens]"),
        Formal("present_state", "T", "[batch, channels, k - 1]"),
    ),
    attributes={"activation": "none", "ndim": 1},
    reference=causal_conv_with_state,
    choices={"activation": CONV_ACTIVATIONS},
    ranges={"ndim": (1, 1)},
)

STANDARD_OPS = {op.name: op for op in (LINEAR_ATTENTION, CAUSAL_CONV_WITH_STATE)}
