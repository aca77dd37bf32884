"""Attention as ONNX Runtime's optimizer and onnxruntime-genai write it: one MultiHeadAttention node."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import operand, optional_operand
from trt_nvfp4.graph_passes.patterns.attention.concatenated import joined
from trt_nvfp4.graph_passes.patterns.attention.types import CachedAttention, DecoderError

# Inputs that change what is computed, behind query, key and value.
_UNSUPPORTED = {3: "bias", 4: "key_padding_mask", 8: "past_sequence_length", 9: "cache_indirection"}
_BIAS, _PAST_KEY, _PAST_VALUE = 5, 6, 7


def match_multi_head(node: ir.Node) -> CachedAttention | None:
    """The node's attention over a cache; None for any other node. Raises DecoderError for what the contract has no
    place for."""
    if node.op_type != "MultiHeadAttention" or node.domain != "com.microsoft":
        return None
    where = f"node '{node.name}' (MultiHeadAttention)"
    query, key, value = (optional_operand(node, index) for index in range(3))
    past = (optional_operand(node, _PAST_KEY), optional_operand(node, _PAST_VALUE))
    if query is None or key is None or value is None:
        raise DecoderError(f"{where} has its queries, keys and values in one input")
    for index, what in _UNSUPPORTED.items():
        if optional_operand(node, index) is not None:
            raise DecoderError(f"{where} has an input {what}")
    heads = node.attributes["num_heads"].as_int()
    scale = node.attributes.get_float("scale", 0.0) or None
    mask = optional_operand(node, _BIAS)
    if mask is None and not node.attributes.get_int("unidirectional", 0):
        raise DecoderError(f"{where} has no attention_bias that makes it causal")
    result = node.outputs[0]
    if past[0] is not None and past[1] is not None:
        if len(node.outputs) < 3:
            raise DecoderError(f"{where} gives out no cache")
        present = (node.outputs[1], node.outputs[2])
        return CachedAttention(
            node, query, key, value, (past[0], past[1]), present, result, scale, True, True, heads, heads, mask=mask
        )
    # Heads that share keys and values are repeated in front of it, behind the Concat of past and new.
    (keys, key_factor), (values, value_factor) = joined(key), joined(value)
    if keys is None or values is None:
        return None
    if (key_factor, value_factor) != (1, 1):
        raise DecoderError(f"{where} reads a cache that is multiplied by a number")
    return CachedAttention(
        node=node,
        query=query,
        key=operand(keys, 1),
        value=operand(values, 1),
        past=(operand(keys, 0), operand(values, 0)),
        present=(keys.outputs[0], values.outputs[0]),
        result=result,
        scale=scale,
        flat=True,
        flat_keys=False,
        heads=heads,
        mask=mask,
    )
