"""A robot policy of pi0's structure: a SigLIP encoder, a Gemma prefix, and an action expert that denoises actions by
flow matching while it attends to the prefix's keys and values. Random weights; the sizes are pi0's, or small ones for
tests.

    build-engine examples/vla/policy.py:components -o policy --target rtx-blackwell

The environment variables VLA_SIZE (small, narrow, full), VLA_STEPS (denoising steps), VLA_UNROLL (1: the steps are one
graph) and VLA_DTYPE (float32, bfloat16) choose. pi05.py is pi0.5, whose expert takes the time otherwise.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from trt_nvfp4 import Component, Loop


@dataclass(frozen=True)
class Stack:
    """A transformer: widths of tokens and MLPs, layers, heads."""

    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Sizes:
    """A policy. `text` are the tokens of the instruction, `horizon` the actions of one chunk."""

    vision: Stack
    prefix: Stack
    action: Stack
    image: int
    patch: int
    cameras: int
    text: int
    vocabulary: int
    horizon: int
    action_dim: int

    @property
    def image_tokens(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def prefix_tokens(self) -> int:
        return self.cameras * self.image_tokens + self.text


SIZES = {
    # SigLIP So400m/14, Gemma 2B, and an expert of 300M: three cameras of 256 tokens and 200 tokens of text.
    "full": Sizes(
        vision=Stack(1152, 4304, 27, 16, 16, 72),
        prefix=Stack(2048, 16384, 18, 8, 1, 256),
        action=Stack(1024, 4096, 18, 8, 1, 256),
        image=224,
        patch=14,
        cameras=3,
        text=200,
        vocabulary=257152,
        horizon=50,
        action_dim=32,
    ),
    # As deep and with as many tokens as the full one, an eighth as wide.
    "narrow": Sizes(
        vision=Stack(144, 544, 27, 2, 2, 72),
        prefix=Stack(256, 2048, 18, 8, 1, 32),
        action=Stack(128, 512, 18, 8, 1, 32),
        image=224,
        patch=14,
        cameras=3,
        text=200,
        vocabulary=1000,
        horizon=50,
        action_dim=32,
    ),
    "small": Sizes(
        vision=Stack(64, 128, 2, 2, 2, 32),
        prefix=Stack(64, 256, 2, 4, 1, 32),
        action=Stack(64, 128, 2, 4, 1, 32),
        image=28,
        patch=14,
        cameras=2,
        text=8,
        vocabulary=100,
        horizon=10,
        action_dim=8,
    ),
}


class RMSNorm(nn.Module):
    """Gemma's: the weight is what is added to 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return hidden


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, heads, tokens, dim] at `positions` [tokens]."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 10000 ** (torch.arange(half, device=x.device) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    """A Gemma layer whose attention also sees keys and values that are given."""

    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.size = size
        inner, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size.width), RMSNorm(size.width)
        self.q_proj = nn.Linear(size.width, inner, bias=False)
        self.k_proj = nn.Linear(size.width, kv, bias=False)
        self.v_proj = nn.Linear(size.width, kv, bias=False)
        self.o_proj = nn.Linear(inner, size.width, bias=False)
        self.mlp = GatedMLP(size.width, size.intermediate)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen, key, value = self.attend(self.input_layernorm(x), positions, past)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), key, value

    def attend(
        self, y: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self._heads(each(y)) for each in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, positions), rotate(key, positions)
        keys, values = (torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)) if past else (key, value)
        # Everything sees everything: the prefix is bidirectional, and so is a chunk of actions.
        seen = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2)), key, value

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)


class VisionLayer(nn.Module):
    def __init__(self, size: Stack) -> None:
        super().__init__()
        self.size = size
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size.width, size.width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(size.width, size.intermediate), nn.Linear(size.intermediate, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer_norm1(x)
        query, key, value = (
            each(y).unflatten(-1, (self.size.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out_proj(seen.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.fc2(functional.gelu(self.fc1(self.layer_norm2(x)), approximate="tanh"))
        return x + hidden


class Vision(nn.Module):
    """pixels [cameras, 3, image, image] -> features [1, cameras * image tokens, width of the prefix]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        size = sizes.vision
        self.patch_embedding = nn.Conv2d(3, size.width, sizes.patch, sizes.patch)
        self.position_embedding = nn.Parameter(torch.randn(sizes.image_tokens, size.width) * 0.02)
        self.layers = nn.ModuleList(VisionLayer(size) for _ in range(size.layers))
        self.post_layernorm = nn.LayerNorm(size.width)
        self.projector = nn.Linear(size.width, sizes.prefix.width)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2) + self.position_embedding
        for layer in self.layers:
            x = layer(x)
        features: torch.Tensor = self.projector(self.post_layernorm(x))
        return features.reshape(1, -1, features.shape[-1])


class Prefix(nn.Module):
    """(features, instruction ids [1, text]) -> keys and values of every layer, [1, kv_heads, tokens, head_dim].

    The last layer's own output is not needed: actions attend to keys and values alone.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.prefix.width)
        self.layers = nn.ModuleList(Layer(sizes.prefix) for _ in range(sizes.prefix.layers))

    def forward(self, features: torch.Tensor, instruction: torch.Tensor) -> tuple[torch.Tensor, ...]:
        text = self.embed_tokens(instruction) * math.sqrt(features.shape[-1])
        x = torch.cat((features, text.to(features.dtype)), 1)
        positions = torch.arange(x.shape[1], device=x.device)
        cache: list[torch.Tensor] = []
        for layer in self.layers:
            x, key, value = layer(x, positions)
            cache += [key, value]
        return tuple(cache)


def of_time(time: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines [1, width] of `time` [1], between 0 and 1."""
    periods = torch.exp(torch.linspace(math.log(4e-3), math.log(4.0), width // 2, device=time.device))
    angles = time.float()[:, None] * (2 * math.pi / periods)
    return torch.cat((angles.sin(), angles.cos()), -1).to(time.dtype)


class ActionStep(nn.Module):
    """(actions [1, horizon, action_dim], time [1], state [1, action_dim], *cache) -> actions, one step further.

    Flow matching: the expert predicts the velocity from noise (time 1) to actions (time 0), and a step follows it.
    """

    def __init__(self, sizes: Sizes, steps: int) -> None:
        super().__init__()
        self.sizes, self.steps = sizes, steps
        width = sizes.action.width
        self.state_proj = nn.Linear(sizes.action_dim, width)
        self.action_in_proj = nn.Linear(sizes.action_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(sizes.action) for _ in range(sizes.action.layers))
        self.norm = RMSNorm(width)
        self.action_out_proj = nn.Linear(width, sizes.action_dim)

    def velocity(
        self, actions: torch.Tensor, time: torch.Tensor, state: torch.Tensor, cache: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        x = self.action_in_proj(actions)
        x = torch.cat((x, of_time(time, x.shape[-1])[:, None].expand_as(x)), -1)
        x = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(x)))
        x = torch.cat((self.state_proj(state)[:, None], x), 1)
        positions = torch.arange(x.shape[1], device=x.device) + self.sizes.prefix_tokens
        for number, layer in enumerate(self.layers):
            x, _, _ = layer(x, positions, cache[2 * number : 2 * number + 2])
        found: torch.Tensor = self.action_out_proj(self.norm(x[:, 1:]))
        return found

    def forward(
        self, actions: torch.Tensor, time: torch.Tensor, state: torch.Tensor, *cache: torch.Tensor
    ) -> torch.Tensor:
        return actions - self.velocity(actions, time, state, cache) / self.steps


class AllSteps(nn.Module):
    """(actions, [state], *cache) -> actions at time 0: the steps as one graph."""

    def __init__(self, step: nn.Module, steps: int) -> None:
        super().__init__()
        self.step, self.steps = step, steps

    def forward(self, actions: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for time in times(self.steps):
            actions = self.step(actions, torch.full((1,), time, dtype=actions.dtype), *rest)
        return actions


def times(steps: int) -> list[float]:
    """From noise, 1, towards actions, 0."""
    return [1 - step / steps for step in range(steps)]


def policy(
    sizes: Sizes,
    steps: int = 10,
    unroll: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    expert: Callable[[Sizes, int], nn.Module] = ActionStep,
    takes_state: bool = True,
) -> dict[str, Component]:
    """The parts: vision, prefix, and action, which runs `steps` times or is unrolled."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # no copy in float32 first
    try:
        vision, prefix, step = Vision(sizes), Prefix(sizes), expert(sizes, steps)
    finally:
        torch.set_default_dtype(before)
    cache = [f"{part}_{layer}" for layer in range(sizes.prefix.layers) for part in ("key", "value")]
    noise, state = torch.randn(1, sizes.horizon, sizes.action_dim), torch.randn(1, sizes.action_dim)
    given: dict[str, torch.Tensor | str] = {"actions": noise.to(dtype)}
    if not unroll:
        given["time"] = torch.ones(1, dtype=dtype)
    if takes_state:
        given["state"] = state.to(dtype)
    given |= {name: f"prefix.{name}" for name in cache}
    return {
        "vision": Component(
            vision, {"pixels": torch.rand(sizes.cameras, 3, sizes.image, sizes.image).to(dtype)}, ["features"]
        ),
        "prefix": Component(
            prefix,
            {
                "features": "vision.features",
                "instruction": torch.randint(0, sizes.vocabulary, (1, sizes.text)),
            },
            cache,
        ),
        "action": Component(
            AllSteps(step, steps) if unroll else step,
            given,
            ["next_actions"],
            loop=None if unroll else Loop(steps, {"next_actions": "actions"}, {"time": times(steps)}),
        ),
    }


def chosen() -> tuple[Sizes, int, bool, torch.dtype]:
    """Sizes, steps, unrolled or not, and type, as the environment says."""
    return (
        SIZES[os.environ.get("VLA_SIZE", "small")],
        int(os.environ.get("VLA_STEPS", "10")),
        os.environ.get("VLA_UNROLL") == "1",
        getattr(torch, os.environ.get("VLA_DTYPE", "float32")),
    )


def components() -> dict[str, Component]:
    """What build-engine calls."""
    return policy(*chosen())
