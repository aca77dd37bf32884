"""Operations of a decoder on its caches: Torch operators that become one ONNX operator each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from onnxscript import values

OPSET = 24
_onnx = values.Opset("", OPSET)
_ZERO = numpy_helper.from_array(np.zeros(1, np.int64))


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


@torch.library.custom_op("trt_nvfp4::last_tokens", mutates_args=())
def last_tokens(hidden: torch.Tensor, new_length: torch.Tensor, most: int) -> torch.Tensor:
    """The last valid tokens of each sequence, [batch, min(tokens, most), features].

    `hidden` is [batch, tokens, features], of which `new_length` [batch] tokens are valid. A sequence
    with fewer of them repeats its first in front.
    """
    count = min(hidden.shape[1], most)
    index = (new_length[:, None] - count + torch.arange(count, device=hidden.device)).clamp(min=0)
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))


@append.register_fake
def _(cache: torch.Tensor, new: torch.Tensor, past_length: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@last_tokens.register_fake
def _(hidden: torch.Tensor, new_length: torch.Tensor, most: int) -> torch.Tensor:
    rows = torch.sym_min(hidden.shape[1], most)  # type: ignore[no-untyped-call]
    return hidden.new_empty((hidden.shape[0], rows, hidden.shape[2]))


def _tensor_scatter(cache: Any, new: Any, past_length: Any) -> Any:
    return _onnx.TensorScatter(cache, new, past_length, axis=-2, mode="linear")


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    result, *_ = _onnx.Attention(query, key, value, mask, scale=scale)
    return result


def _last_tokens(hidden: Any, new_length: Any, most: int) -> Any:
    def constant(*numbers: int) -> Any:
        return _onnx.Constant(value_ints=numbers)

    # In operators whose lengths ONNX's shape inference follows, which Min and Range are not.
    zeros = _onnx.Slice(
        _onnx.ConstantOfShape(_onnx.Shape(hidden, start=1, end=2), value=_ZERO), constant(0), constant(most)
    )
    count = _onnx.Shape(zeros)
    places = _onnx.Add(zeros, _onnx.Slice(constant(*range(most)), constant(0), count))
    # By Reshape: inference takes an unsqueezed vector for a shape that it can follow, and fails at the Add.
    lengths = _onnx.Reshape(new_length, constant(-1, 1))
    index = _onnx.Max(_onnx.Add(_onnx.Sub(lengths, count), places), constant(0))
    return _onnx.GatherND(hidden, _onnx.Unsqueeze(index, constant(2)), batch_dims=1)


#: For torch.onnx.export's `custom_translation_table`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.trt_nvfp4.append.default: _tensor_scatter,
    torch.ops.trt_nvfp4.attention.default: _attention,
    torch.ops.trt_nvfp4.last_tokens.default: _last_tokens,
}
