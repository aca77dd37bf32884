"""Matrix products and attention."""

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator


@operator("MatMul")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@operator("Gemm")
def gemm(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    x, y = x.t() if transA else x, y.t() if transB else y
    found = x @ y if alpha == 1 else alpha * (x @ y)
    return found if bias is None else found + (bias if beta == 1 else beta * bias)


@operator("Einsum")
def einsum(*tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *tensors)


@operator("Attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: int = 0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 1,
    qk_matmul_output_mode: int = 0,
) -> Tensor:
    """Over keys and values that are given whole: [batch, heads, tokens, head_dim], or 3-D with all heads in a row.
    Computed as Torch does, with sums in float32."""
    flat = q.dim() == 3
    if flat:
        q = _by_head(q, q_num_heads)
        k, v = _by_head(k, kv_num_heads), _by_head(v, kv_num_heads)
    if is_causal:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = _both(mask, ones.tril())
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if softcap:
        y = _soft_capped(q, k, v, mask, scale or q.shape[-1] ** -0.5, softcap)
    else:
        y = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) if flat else y


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _both(mask: Tensor | None, causal: Tensor) -> Tensor:
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    scores = q.float() @ k.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ v).to(q.dtype)


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """x [batch, heads, tokens, head_dim], or [batch, tokens, heads head_dim]; tables [batch, tokens, half], or with
    positions [positions, half]."""
    flat = x.dim() == 3
    by_token = x.view(*x.shape[:2], num_heads, -1) if flat else x.transpose(1, 2)
    if positions is not None:
        cos, sin = functional.embedding(positions, cos), functional.embedding(positions, sin)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = rotary_embedding_dim or by_token.shape[-1]
    rotary, rest = by_token[..., :turned], by_token[..., turned:]
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, -1)
    real, imaginary = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack((real, imaginary), -1).flatten(-2) if interleaved else torch.cat((real, imaginary), -1)
    found = torch.cat((joined, rest), -1)
    return found.flatten(2) if flat else found.transpose(1, 2)
