"""Other action heads behind a language model's prefix: SmolVLA's, whose layers take turns between the prefix's keys and
values and the actions themselves, and GR00T's, a diffusion transformer that attends to the prefix's last states.

    build-engine examples/vla/heads.py:smolvla -o smolvla --target rtx-blackwell
    build-engine examples/vla/heads.py:gr00t -o gr00t --target rtx-blackwell

Random weights. VLA_SIZE (small, full) and VLA_STEPS choose as in policy.py; the image features are an input.
"""

import math
import os
from collections.abc import Sequence

import torch
from policy import Layer, Stack, times
from torch import nn
from torch.nn import functional

from trt_nvfp4 import Component, Loop

# Prefix, expert, tokens of the prefix, actions of a chunk and their width.
SMOLVLA = {
    "full": (Stack(960, 2560, 16, 15, 5, 64), Stack(720, 2048, 16, 15, 5, 64), 241, 50, 32),
    "small": (Stack(64, 128, 2, 4, 2, 16), Stack(32, 64, 2, 4, 2, 16), 12, 10, 8),
}
GR00T = {
    "full": (Stack(2048, 6144, 12, 16, 8, 128), Stack(1536, 6144, 16, 32, 32, 48), 296, 16, 32),
    "small": (Stack(64, 128, 2, 4, 2, 16), Stack(64, 128, 2, 4, 4, 16), 12, 8, 8),
}


def of_time(time: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines [1, width] of a number between 0 and 1."""
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = time.float()[:, None] * 1000 * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).to(time.dtype)


class Prefix(nn.Module):
    """features [1, tokens, width] -> keys and values of every layer, or the last layer's states."""

    def __init__(self, size: Stack, states: bool) -> None:
        super().__init__()
        self.states = states
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(features.shape[1], device=features.device)
        cache: list[torch.Tensor] = []
        x = features
        for layer in self.layers:
            x, key, value = layer(x, positions)
            cache += [key, value]
        return (x,) if self.states else tuple(cache)


class CrossLayer(nn.Module):
    """Actions attend to the prefix's keys and values alone, projected to the expert's."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.own = Layer(size)
        self.k_proj, self.v_proj = (nn.Linear(size.head_dim, size.head_dim, bias=False) for _ in range(2))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        key, value = self.k_proj(past[0]), self.v_proj(past[1])
        own = self.own
        query = own.q_proj(own.input_layernorm(x)).unflatten(-1, (-1, own.size.head_dim)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        x = x + own.o_proj(seen.transpose(1, 2).flatten(2))
        return x + own.mlp(own.post_attention_layernorm(x)), key, value


class SmolVlaStep(nn.Module):
    """(actions, time [1], *cache) -> actions, one step of flow matching further."""

    def __init__(self, size: Stack, tokens: int, action_dim: int, steps: int) -> None:
        super().__init__()
        self.tokens, self.steps, self.width = tokens, steps, size.width
        self.action_in_proj = nn.Linear(action_dim, size.width)
        self.action_time_mlp_in = nn.Linear(2 * size.width, size.width)
        self.action_time_mlp_out = nn.Linear(size.width, size.width)
        self.layers = nn.ModuleList(CrossLayer(size) if n % 2 else Layer(size) for n in range(size.layers))
        self.action_out_proj = nn.Linear(size.width, action_dim)

    def forward(self, actions: torch.Tensor, time: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        x = self.action_in_proj(actions)
        x = torch.cat((x, of_time(time, self.width)[:, None].expand_as(x)), -1)
        x = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(x)))
        positions = torch.arange(x.shape[1], device=x.device) + self.tokens
        for number, layer in enumerate(self.layers):
            x, _, _ = layer(x, positions, cache[2 * number : 2 * number + 2])
        return actions - self.action_out_proj(x) / self.steps


class DiTLayer(nn.Module):
    """A layer whose norm follows the time; every other one attends to the prefix's states."""

    def __init__(self, size: Stack, context: int) -> None:
        super().__init__()
        self.size = size
        self.norm1 = nn.LayerNorm(size.width, elementwise_affine=False)
        self.norm3 = nn.LayerNorm(size.width)
        self.modulation = nn.Linear(size.width, 2 * size.width)
        self.to_q, self.to_out = (nn.Linear(size.width, size.width) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(context, size.width) for _ in range(2))
        self.proj, self.out = nn.Linear(size.width, size.intermediate), nn.Linear(size.intermediate, size.width)

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        scale, shift = self.modulation(functional.silu(time))[:, None].chunk(2, -1)
        y = self.norm1(x) * (1 + scale) + shift
        source = y if context is None else context
        query, key, value = (
            each.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)
            for each in (self.to_q(y), self.to_k(source), self.to_v(source))
        )
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.to_out(seen.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.out(functional.gelu(self.proj(self.norm3(x)), approximate="tanh"))
        return x + hidden


class DiTStep(nn.Module):
    """(actions, time [1], state [1, action_dim], states [1, tokens, context]) -> actions, one step further."""

    def __init__(self, size: Stack, context: int, horizon: int, action_dim: int, steps: int) -> None:
        super().__init__()
        self.steps, self.width = steps, size.width
        self.state_encoder = nn.Linear(action_dim, size.width)
        self.action_encoder = nn.Linear(action_dim, size.width)
        self.position_embedding = nn.Parameter(torch.randn(horizon + 1, size.width) * 0.02)
        self.time_in, self.time_out = nn.Linear(size.width, size.width), nn.Linear(size.width, size.width)
        self.layers = nn.ModuleList(DiTLayer(size, size.width if n % 2 else context) for n in range(size.layers))
        self.action_decoder = nn.Linear(size.width, action_dim)

    def forward(
        self, actions: torch.Tensor, time: torch.Tensor, state: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        t = self.time_out(functional.silu(self.time_in(of_time(time, self.width))))
        x = torch.cat((self.state_encoder(state)[:, None], self.action_encoder(actions)), 1) + self.position_embedding
        for number, layer in enumerate(self.layers):
            x = layer(x, t, None if number % 2 else states)
        velocity: torch.Tensor = self.action_decoder(x[:, 1:])
        return actions - velocity / self.steps


def _chosen() -> tuple[str, int | None]:
    steps = os.environ.get("VLA_STEPS")
    return os.environ.get("VLA_SIZE", "small"), None if steps is None else int(steps)


def smolvla() -> dict[str, Component]:
    """Ten steps over the prefix's keys and values."""
    name, steps = _chosen()
    prefix, expert, tokens, horizon, action_dim = SMOLVLA[name]
    steps = steps or 10
    torch.manual_seed(0)
    cache = [f"{part}_{layer}" for layer in range(prefix.layers) for part in ("key", "value")]
    return {
        "prefix": Component(Prefix(prefix, False), {"features": torch.randn(1, tokens, prefix.width)}, cache),
        "action": Component(
            SmolVlaStep(expert, tokens, action_dim, steps),
            {
                "actions": torch.randn(1, horizon, action_dim),
                "time": torch.ones(1),
                **{name: f"prefix.{name}" for name in cache},
            },
            ["next_actions"],
            loop=Loop(steps, {"next_actions": "actions"}, {"time": times(steps)}),
        ),
    }


def gr00t() -> dict[str, Component]:
    """Four steps of a diffusion transformer."""
    name, steps = _chosen()
    prefix, expert, tokens, horizon, action_dim = GR00T[name]
    steps = steps or 4
    torch.manual_seed(0)
    return {
        "prefix": Component(Prefix(prefix, True), {"features": torch.randn(1, tokens, prefix.width)}, ["states"]),
        "action": Component(
            DiTStep(expert, prefix.width, horizon, action_dim, steps),
            {
                "actions": torch.randn(1, horizon, action_dim),
                "time": torch.ones(1),
                "state": torch.randn(1, action_dim),
                "states": "prefix.states",
            },
            ["next_actions"],
            loop=Loop(steps, {"next_actions": "actions"}, {"time": times(steps)}),
        ),
    }
