"""Attention as onnxruntime-genai exports it: one GroupQueryAttention node of ONNX Runtime."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import optional_operand

from .types import CachedAttention, DecoderError, Rotary

# Inputs behind the rotary tables, and attributes, that change what is computed.
_UNSUPPORTED_INPUTS = {10: "attention_bias", 11: "head_sink", 12: "k_scale", 13: "v_scale"}
_UNSUPPORTED_ATTRIBUTES = ("softcap", "smooth_softmax", "kv_cache_bit_width", "qk_output")


def match_group_query(node: ir.Node) -> CachedAttention | None:
    """The node's attention; None for any other node. Raises DecoderError for what the contract has no place
    for."""
    if node.op_type != "GroupQueryAttention" or node.domain != "com.microsoft":
        return None
    for index, what in _UNSUPPORTED_INPUTS.items():
        if index < len(node.inputs) and node.inputs[index] is not None:
            raise DecoderError(f"node '{node.name}' (GroupQueryAttention) has an input {what}")
    for name in _UNSUPPORTED_ATTRIBUTES:
        if name in node.attributes and node.attributes[name].value not in (0, 0.0, -1):
            raise DecoderError(f"node '{node.name}' (GroupQueryAttention) has {name}")
    query, key, value, past_key, past_value = (optional_operand(node, index) for index in range(5))
    if query is None or past_key is None or past_value is None or len(node.outputs) < 3:
        raise DecoderError(f"node '{node.name}' (GroupQueryAttention) has no cache")
    scale = node.attributes.get_float("scale", 0.0)
    window = node.attributes.get_int("local_window_size", -1)
    return CachedAttention(
        node=node,
        query=query,
        key=key,
        value=value,
        past=(past_key, past_value),
        present=(node.outputs[1], node.outputs[2]),
        result=node.outputs[0],
        scale=scale or None,
        flat=True,
        heads=node.attributes["num_heads"].as_int(),
        kv_heads=node.attributes["kv_num_heads"].as_int(),
        rotary=_rotary(node),
        window=window if window > 0 else None,
    )


def _rotary(node: ir.Node) -> Rotary | None:
    if not node.attributes.get_int("do_rotary", 0):
        return None
    cos, sin = optional_operand(node, 7), optional_operand(node, 8)
    if cos is None or sin is None:
        raise DecoderError(f"node '{node.name}' (GroupQueryAttention) turns its queries, and has no tables for it")
    return Rotary(cos, sin, node.attributes.get_int("rotary_interleaved", 0))
