"""What a decoder does with its caches, as Torch operators that become one ONNX operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import values

OPSET = 24
_onnx = values.Opset("", OPSET)


@torch.library.custom_op("trt_nvfp4::append", mutates_args=())
def append(cache: torch.Tensor, new: torch.Tensor, past_length: torch.Tensor) -> torch.Tensor:
    """The cache [batch, heads, capacity, dim] with `new` [batch, heads, tokens, dim] at `past_length` [batch]."""
    index = past_length[:, None] + torch.arange(new.shape[2], device=new.device)
    return cache.scatter(2, index[:, None, :, None].expand(new.shape), new)


@torch.library.custom_op("trt_nvfp4::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale * query key^T) value where `mask` holds; fewer heads of keys and values serve groups of queries.

    `query` [batch, heads, tokens, dim], `key` and `value` [batch, kv_heads, capacity, dim], `mask` bool
    [batch, 1, tokens, capacity]; the result is [batch, heads, tokens, value's dim].
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    ).contiguous()


@append.register_fake
def _(cache: torch.Tensor, new: torch.Tensor, past_length: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _tensor_scatter(cache: Any, new: Any, past_length: Any) -> Any:
    return _onnx.TensorScatter(cache, new, past_length, axis=-2, mode="linear")


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    result, *_ = _onnx.Attention(query, key, value, mask, scale=scale)
    return result


#: For torch.onnx.export's `custom_translation_table`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.trt_nvfp4.append.default: _tensor_scatter,
    torch.ops.trt_nvfp4.attention.default: _attention,
}
