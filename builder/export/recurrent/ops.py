"""ONNX's `LinearAttention` as a Torch operator that becomes one node."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import values

from trt_nvfp4.plugins.ops import standard

#: The first opset that has it.
OPSET = 27
_onnx = values.Opset("", OPSET)


def is_one(node: ir.Node) -> bool:
    return node.op_type == "LinearAttention" and not node.domain


@torch.library.custom_op("trt_nvfp4::linear_attention", mutates_args=())
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per head and token: S = exp(decay) S; S = S + k (v - S^T k beta-weighted); out = scale q^T S. See ONNX.

    `query` and `key` [batch, tokens, heads * d_k], `value` [batch, tokens, heads * d_v], `past` [batch, heads, d_k,
    d_v] in float32, `decay` (logarithms, not above 0) [batch, tokens, heads] or [batch, tokens, heads * d_k]; `beta`
    [batch, tokens, heads], or None for no delta rule. Returns [batch, tokens, heads * d_v] and the state behind the
    last token. Computed in float32.
    """
    heads = past.shape[1]
    rule = "gated" if beta is None else "gated_delta"
    return standard.linear_attention(
        query, key, value, past, decay, beta, q_num_heads=heads, kv_num_heads=heads, update_rule=rule, scale=scale
    )


@linear_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(value), torch.empty_like(past)


def _linear_attention(
    query: Any, key: Any, value: Any, past: Any, decay: Any, beta: Any, scale: float
) -> tuple[Any, Any]:
    heads = past.shape[1]
    rule = "gated" if beta is None else "gated_delta"
    given = (query, key, value, past, decay) + (() if beta is None else (beta,))
    output, present = _onnx.LinearAttention(
        *given, q_num_heads=heads, kv_num_heads=heads, scale=scale, update_rule=rule
    )
    # The exporter's converter stops at its own opset; `torch_module.save` states this one.
    output.producer().version = None
    return output, present


#: For torch.onnx.export's `custom_translation_table`.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.trt_nvfp4.linear_attention.default: _linear_attention,
}
