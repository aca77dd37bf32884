"""A diffusion transformer of two blocks (adaLN-Zero, Peebles & Xie, arXiv 2212.09748), with random weights."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, FREQUENCIES = 64, 4, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self._attention(self.norms[0](x) * (1 + scale) + shift)
        hidden = functional.gelu(self.up(self.norms[1](x) * (1 + mlp_scale) + mlp_shift), approximate="tanh")
        return x + mlp_gate * self.down(hidden)

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


class DiT(nn.Module):
    """Latents [batch, tokens, WIDTH] and timesteps int64 [batch] -> [batch, tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2 * FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        steps = torch.arange(FREQUENCIES, dtype=torch.float32, device=x.device)
        angles = timestep[:, None].float() * torch.exp(-math.log(10000.0) / FREQUENCIES * steps)
        condition = functional.silu(self.embed(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)))
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return self.head(self.norm(x) * (1 + scale) + shift)
