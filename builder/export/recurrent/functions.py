"""The recurrences of transformers' modeling code, over states that are inputs and outputs, with no loop over tokens.

transformers names its functions by what they compute, whatever the family. Each stand-in here has the name's arguments
and results, takes the layer's next state and keeps what becomes of it. Padding moves no state: of a padded token the
decay is 1 and nothing is added, and a convolution keeps what stands before the padding. States are float32, those of
convolutions in the layer's type. Decays are computed in float32 and rounded once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from trt_nvfp4.builder.export.decoder.caches import StepCache
from trt_nvfp4.builder.export.recurrent.ops import linear_attention

#: Parts of a layer's state, in its tensors' names.
CONV, RECURRENT = "conv", "recurrent"
#: Below it a decay is 0 in float32, and its logarithm would be infinite.
_SMALLEST_DECAY = 1e-37


def recurrence(
    cache: StepCache,
    dtype: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_attention` over the current layer's next state, of `value`'s heads, in the layer's `dtype`. `query` and
    `key` [batch, tokens, heads or a divisor of them, d_k], `value` [batch, tokens, heads, d_v], `decay` [batch, tokens,
    heads(, d_k)]; what adds to the state is 0 at padding already. Returns [batch, tokens, heads, d_v] and the state."""
    heads, d_v = value.shape[2:]
    query, key = (_of_heads(tensor, heads) for tensor in (query, key))
    empty = value.new_zeros((value.shape[0], heads, key.shape[3], d_v), dtype=torch.float32)

    def step(past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, logarithms = (tensor.flatten(2).to(dtype) for tensor in (query, key, value, decay))
        found: tuple[torch.Tensor, torch.Tensor] = linear_attention(
            q, k, v, past, logarithms, None if beta is None else beta.to(dtype), scale
        )
        return found

    output, present = cache.advance(RECURRENT, empty, step)
    return output.reshape(value.shape), present


def _of_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, tokens, heads, dim] of a tensor whose heads each serve several."""
    own = tensor.shape[2]
    return tensor if own == heads else tensor[:, :, :, None].expand(-1, -1, -1, heads // own, -1).flatten(2, 3)


def causal_conv(cache: StepCache) -> Callable[..., torch.Tensor]:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """A depthwise convolution of [batch, channels, tokens] by `weight` [channels, size]."""
        batch, channels, _tokens = hidden_states.shape
        kept = weight.shape[1] - 1
        # Expanded first: ONNX's shape inference takes a sum of lengths and numbers for one of two shapes.
        lengths = cache.new_length[:, None, None].expand(-1, channels, 1)

        def step(past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            padded = torch.cat((past, hidden_states), 2)
            last = lengths + torch.arange(kept, device=padded.device)
            output = functional.conv1d(padded.to(weight.dtype), weight[:, None], bias, groups=channels)
            return output, padded.gather(2, last)

        output = cache.advance(CONV, hidden_states.new_zeros((batch, channels, kept)), step)[0]
        return (output if activation is None else ACT2FN[activation](output)).to(hidden_states.dtype)

    return causal_conv1d_fn


def gated_delta(cache: StepCache) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes tensors of [batch, tokens, heads, dim]; `g`, the decay, is per head or per channel of keys."""
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        scale = key.shape[-1] ** -0.5
        return recurrence(cache, value.dtype, query, key, value, cache.unpadded(g), cache.unpadded(beta), scale)

    return gated_delta_rule


def state_space(cache: StepCache) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int = 0,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mamba2: `hidden_states` [batch, tokens, heads, dim], `dt` [batch, tokens, heads], `A` and `D` [heads], `B`
        and `C` [batch, tokens, groups, states]."""
        dtype = hidden_states.dtype
        dt = _time_steps(dt, dt_bias, dt_softplus)
        if tuple(dt_limit) != (0.0, float("inf")):
            dt = dt.clamp(*dt_limit)
        dt, hidden_states = cache.unpadded(dt), hidden_states.float()
        output, present = recurrence(cache, dtype, C, B, hidden_states * dt[..., None], A.float() * dt, None, 1.0)
        return output if D is None else output + D[:, None] * hidden_states, present

    return mamba2_chunk_scan


def selective_scan(cache: StepCache) -> Callable[..., Any]:
    def mamba_selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """Mamba1: `hidden_states`, `dt` and `z` [batch, channels, tokens], `A` [channels, states], `B` and `C` [batch,
        states, tokens]. Each channel is a head of one value, whose decay differs per state."""
        by_token = hidden_states.transpose(1, 2).float()
        dt = _time_steps(dt.transpose(1, 2), delta_bias, delta_softplus)
        dt = cache.unpadded(dt)
        keys, queries = (tensor.transpose(1, 2)[:, :, None] for tensor in (B, C))
        values = (by_token * dt)[..., None]
        # Decays of a state differ by orders of magnitude: in 16 bits they lose what sets them apart.
        wide, decay = torch.float32, dt[..., None] * A.float()
        output, present = recurrence(cache, wide, queries, keys, values, decay, None, 1.0)
        output = output[..., 0] if D is None else output[..., 0] + by_token * D
        output = output.transpose(1, 2)
        if z is not None:
            output = output * functional.silu(z)
        return (output, present) if return_last_state else output

    return mamba_selective_scan


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return functional.softplus(dt) if softplus else dt


def diagonal(cache: StepCache, inputs: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """h = decay h + input per channel, [batch, tokens, channels] each (RG-LRU)."""
    one, dtype = inputs.new_ones((*inputs.shape[:2], 1, 1)), inputs.dtype
    logarithm = decay.float().clamp(min=_SMALLEST_DECAY).log()
    inputs = cache.unpadded(inputs.float())
    output, _ = recurrence(cache, dtype, one, one, inputs[..., None], cache.unpadded(logarithm), None, 1.0)
    return output[..., 0]


#: Stand-ins by the names of transformers' functions.
FUNCTIONS: dict[str, Callable[[StepCache], Callable[..., Any]]] = {
    "causal_conv1d_fn": causal_conv,
    "torch_chunk_gated_delta_rule": gated_delta,
    "chunk_kimi_delta_attention": gated_delta,
    "mamba2_chunk_scan": state_space,
    "mamba_selective_scan": selective_scan,
}
