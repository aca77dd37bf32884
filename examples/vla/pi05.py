"""A robot policy of pi0.5's structure: policy.py's vision encoder and prefix, whose text also holds the robot's state,
and an action expert whose norms follow the denoising time.

    build-engine examples/vla/pi05.py:components -o pi05 --target rtx-blackwell

Random weights. VLA_SIZE, VLA_STEPS, VLA_UNROLL and VLA_DTYPE choose as in policy.py.
"""

from collections.abc import Sequence

import torch
from policy import Layer, Sizes, Stack, chosen, of_time, policy
from torch import nn
from torch.nn import functional

from trt_nvfp4 import Component


class AdaptiveRMSNorm(nn.Module):
    """(x [1, tokens, width], condition [1, width]) -> the scaled and shifted norm of x, and the gate of what follows.

    Scale, shift and gate are a linear function of the condition; there is no weight.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + scale.float()) + shift.float()).to(x.dtype), gate


class AdaptiveLayer(Layer):
    """A layer whose norms, and what its branches add, follow the condition."""

    def __init__(self, size: Stack) -> None:
        super().__init__(size)
        self.input_layernorm = AdaptiveRMSNorm(size.width)
        self.post_attention_layernorm = AdaptiveRMSNorm(size.width)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor], condition: torch.Tensor
    ) -> torch.Tensor:
        y, gate = self.input_layernorm(x, condition)
        seen, _, _ = self.attend(y, positions, past)
        x = x + gate * seen
        y, gate = self.post_attention_layernorm(x, condition)
        found: torch.Tensor = x + gate * self.mlp(y)
        return found


class AdaptiveActionStep(nn.Module):
    """(actions [1, horizon, action_dim], time [1], *cache) -> actions, one step further."""

    def __init__(self, sizes: Sizes, steps: int) -> None:
        super().__init__()
        self.sizes, self.steps = sizes, steps
        width = sizes.action.width
        self.action_in_proj = nn.Linear(sizes.action_dim, width)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(AdaptiveLayer(sizes.action) for _ in range(sizes.action.layers))
        self.norm = AdaptiveRMSNorm(width)
        self.action_out_proj = nn.Linear(width, sizes.action_dim)

    def velocity(self, actions: torch.Tensor, time: torch.Tensor, cache: Sequence[torch.Tensor]) -> torch.Tensor:
        x = self.action_in_proj(actions)
        condition = functional.silu(self.time_mlp_in(of_time(time, x.shape[-1])))
        condition = functional.silu(self.time_mlp_out(condition))
        positions = torch.arange(x.shape[1], device=x.device) + self.sizes.prefix_tokens
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, cache[2 * number : 2 * number + 2], condition)
        found: torch.Tensor = self.action_out_proj(self.norm(x, condition)[0])
        return found

    def forward(self, actions: torch.Tensor, time: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        return actions - self.velocity(actions, time, cache) / self.steps


def components() -> dict[str, Component]:
    """What build-engine calls."""
    return policy(*chosen(), expert=AdaptiveActionStep, takes_state=False)
