"""Random calls of LinearAttention and CausalConvWithState, and what float64 makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from op_inputs import random_t
from torch.nn import functional

from trt_nvfp4.plugins.ops import STANDARD_OPS

LINEAR_ATTENTION, CAUSAL_CONV = "LinearAttention", "CausalConvWithState"


@dataclass(frozen=True)
class Shape:
    rule: str
    batch: int
    tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    group: int = 1
    per_row: bool = False  # a decay for each row of a state
    shared_beta: bool = False  # one for all heads
    past: bool = True
    options: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{self.group}x{self.kv_heads}x{self.key_dim}x{self.value_dim}"
        return f"{self.rule} {size} {self.batch}x{self.tokens}{' per row' * self.per_row}"

    @property
    def attributes(self) -> dict[str, Any]:
        heads = {"q_num_heads": self.kv_heads * self.group, "kv_num_heads": self.kv_heads}
        return {**heads, "update_rule": self.rule, **self.options}


AUTO, GENERIC, RECURRENT, CHUNKED = 0, 1, 12, 13

#: For emulators: rows and columns that fill no tile; several query heads; rows' own decays; chunks that end within one.
SMALL = [
    Shape("gated_delta", 2, 3, 2, 32, 48),
    Shape("linear", 1, 2, 1, 80, 16, group=3),
    Shape("gated", 1, 32, 1, 16, 32, per_row=True),
    Shape("delta", 1, 2, 2, 144, 16, shared_beta=True),
]
CHUNKS = [Shape("gated_delta", 1, 67, 1, 80, 48), Shape("gated", 2, 65, 1, 64, 16), Shape("linear", 1, 3, 1, 112, 32)]


def tactics(shape: Shape, dtype: torch.dtype) -> list[int]:
    chunked = dtype != torch.float32 and shape.group == 1 and not shape.per_row and shape.tokens > 0
    chunked &= "delta" not in shape.rule or shape.key_dim <= 128
    return [GENERIC, RECURRENT, *([CHUNKED] if chunked else [])]


def linear_attention_inputs(
    rng: np.random.Generator, shape: Shape, dtype: torch.dtype, state: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """In the op's order. Decays reach from 0 to very negative, betas from 0 to 1; keys are of length 1 as models have
    them."""
    lead = (shape.batch, shape.tokens)

    def packed(heads: int, width: int, unit: bool = False) -> torch.Tensor:
        x = torch.from_numpy(rng.standard_normal((*lead, heads, width)))
        return (functional.normalize(x, dim=-1) if unit else x).flatten(2).to(dtype)

    kv_heads, key_dim = shape.kv_heads, shape.key_dim
    past = random_t(rng, (shape.batch, kv_heads, key_dim, shape.value_dim), state)
    inputs = [
        packed(kv_heads * shape.group, key_dim),
        packed(kv_heads, key_dim, unit=True),
        packed(kv_heads, shape.value_dim),
        past,
    ]
    if not shape.past:
        return inputs[:3]
    decays = (*lead, kv_heads * (key_dim if shape.per_row else 1))
    chosen = rng.choice([-1.0, -0.02, 0.0, -200.0, -6e4], decays, p=[0.45, 0.45, 0.06, 0.02, 0.02])
    betas = (*lead, 1 if shape.shared_beta else kv_heads)
    beta = np.clip(rng.random(betas) * 1.4 - 0.2, 0, 1)
    tensors = {
        "gated": [chosen * rng.random(decays)],
        "delta": [beta, beta],  # what takes a decay's place is not read
        "gated_delta": [chosen * rng.random(decays), beta],
    }
    return inputs + [torch.from_numpy(x).to(dtype) for x in tensors.get(shape.rule, [])]


def expected(shape: Shape, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """output and present_state in float64, of the rounded inputs."""
    return STANDARD_OPS[LINEAR_ATTENTION].reference(*(x.double() for x in tensors), **shape.attributes)


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


#: batch, channels, tokens, width: fewer tokens than the state holds, none, a channel per thread and per warp.
CONVOLUTIONS = [(2, 5, 1, 4), (1, 130, 2, 4), (2, 3, 0, 4), (1, 3, 40, 4), (1, 2, 70, 1), (1, 1, 20, 40), (1, 1, 3, 40)]


def convolution_inputs(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, count: int
) -> list[torch.Tensor]:
    batch, channels, tokens, width = shape
    shapes = [(batch, channels, tokens), (channels, 1, width), (channels,), (batch, channels, width - 1)]
    return [random_t(rng, given, dtype) for given in shapes[:count]]
