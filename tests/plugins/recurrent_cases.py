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
