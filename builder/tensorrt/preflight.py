"""Refuses, before a build, models that TensorRT's parser reads without an error, and otherwise than ONNX means them.

The facts were measured with TensorRT-RTX 1.7.1 (docs/reference/verification.md).
"""

from collections.abc import Iterator
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.tensorrt.network_checks import AttentionNode
from trt_nvfp4.graph_passes.load.normalize import all_nodes, is_gelu_of_onnxruntime
from trt_nvfp4.graph_passes.load.skip_norms import is_skip_norm

_ONNX = ("", "ai.onnx")
# Operators that only ONNX Runtime has, and those that TensorRT lacks of ONNX's.
_ONNX_RUNTIME = "com.microsoft"
_ATTENTIONS = {"GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention"}
_OVER_CACHES = (
    "TensorRT does not have ONNX Runtime's attention; convert the decoder with --cache inplace, or give its Hugging "
    "Face directory"
)
_AS_EXPORTED = (
    "an operator of ONNX Runtime's, which TensorRT does not have; give the model as it was exported, or its Hugging "
    "Face directory"
)
_INTEGER_PRODUCTS = {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
_IN_FLOAT = (
    "TensorRT does not have ONNX's integer operators; give the model in float, or with QuantizeLinear and "
    "DequantizeLinear nodes (ONNX Runtime's QuantFormat.QDQ)"
)
# By its `OnnxParser.supports_operator`; those that ONNX spells out by others may be served so.
_LACKING = {
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Col2Im", "ConcatFromSequence", "CumProd"),
    *("DFT", "DeformConv", "Det", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "SequenceAt"),
    *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence"),
}
_OTHERWISE = (
    "TensorRT-RTX does not have this operator; let the model's code compute it with others, and export it again"
)
# NonZero is parsed, and its plugin is missing.
_COUNTING = {"Compress", "NonZero", "Unique"}
_BY_VALUES = (
    "how many results this has depends on values, as in x[mask], which TensorRT-RTX does not build; choose values with "
    "torch.where in the model's code, and export it again"
)
_PAST_KEY, _PAST_VALUE, _LENGTHS, _MASK = 4, 5, 6, 3
_CACHE_TYPES = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
# What leaves the order of tokens as it is, between a cache and the attention that reads it.
_TRANSPARENT = {"Identity", "Cast", "Reshape", "Transpose", "Expand", "Unsqueeze", "Squeeze", "Mul", "Div"}


def check_readable(path: Path, model: onnx.ModelProto) -> None:
    """Raises ModelFaultError with the first node that TensorRT would read wrongly; `model` needs no weights."""
    problem = next(_problems(model), None)
    if problem is not None:
        raise ModelFaultError(f"{path}: {problem}")


def check_operators(path: Path, model: onnx.ModelProto) -> None:
    """Raises ModelFaultError with the first node of what TensorRT-RTX is to read that it has no operator for."""
    for node in all_nodes(model.graph.node):
        if node.domain in _ONNX and node.op_type in _LACKING | _COUNTING:
            problem = _BY_VALUES if node.op_type in _COUNTING else _OTHERWISE
            raise ModelFaultError(f"{path}: node {node.name or node.output[0]!r} ({node.op_type}): {problem}")


def attentions(model: onnx.ModelProto) -> dict[str, AttentionNode]:
    """The model's Attention nodes by name."""
    found = {}
    for node in model.graph.node:
        if node.op_type == "Attention" and node.domain in _ONNX and node.name:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            causal = "is_causal" in attributes and attributes["is_causal"].i != 0
            scale = attributes["scale"].f if "scale" in attributes else None
            found[node.name] = AttentionNode(_given(node, _MASK), causal, scale)
    return found


def _problems(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    producers = {output: node for node in graph.node for output in node.output}
    known = (*graph.input, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in known}
    shapes = {value.name: _shape(value) for value in known}
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        where = f"node {node.name or node.output[0]!r} ({node.op_type})"
        if node.domain == _ONNX_RUNTIME and not is_gelu_of_onnxruntime(node) and not is_skip_norm(node):
            found = iter([_OVER_CACHES if node.op_type in _ATTENTIONS else _AS_EXPORTED])
        elif node.domain not in _ONNX:
            continue
        elif node.op_type in _INTEGER_PRODUCTS:
            found = iter([_IN_FLOAT])
        elif node.op_type == "Attention":
            found = _attention(node, producers, shapes)
        elif node.op_type == "TensorScatter":
            found = _scatter(node, inputs, outputs, types)
        else:
            continue
        yield from (f"{where}: {problem}" for problem in found)


def _shape(value: onnx.ValueInfoProto) -> list[int | None]:
    """Sizes, None for those that are not fixed."""
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


def _attention(
    node: onnx.NodeProto, producers: dict[str, onnx.NodeProto], shapes: dict[str, list[int | None]]
) -> Iterator[str]:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    causal = "is_causal" in attributes and attributes["is_causal"].i != 0
    if _given(node, _LENGTHS):
        yield (
            "TensorRT ignores nonpad_kv_seqlen and would attend to what padding left; give a bool mask computed from "
            "positions instead"
        )
    if _given(node, _PAST_KEY) or _given(node, _PAST_VALUE):
        yield (
            "TensorRT's attention takes no past_key and past_value; append to the caches with TensorScatter in front "
            "of it (--cache inplace converts known decoders)"
        )
    if any(name for name in node.output[1:]):
        yield "TensorRT's attention has one output; take the caches from the nodes in front of it"
    if "softcap" in attributes and attributes["softcap"].f != 0:
        yield "TensorRT's attention has no softcap; spell it out as MatMul, Tanh and Softmax"
    if "softmax_precision" in attributes:
        yield "TensorRT's attention chooses the type of its softmax; leave out softmax_precision"
    if _given(node, _MASK) and _shorter(shapes.get(node.input[_MASK], []), shapes.get(node.input[1], [])):
        yield "ONNX hides the keys that a shorter mask does not cover, TensorRT does not; give a mask for all keys"
    if causal and _given(node, _MASK):
        yield "TensorRT takes is_causal or a mask, not both; put causality into the mask"
    if causal and _over_cache(node.input[1], producers):
        yield (
            "is_causal counts from the first cached token, in TensorRT as in ONNX, so that new tokens would not see "
            "the cache; give a bool mask computed from positions instead"
        )


def _shorter(mask: list[int | None], keys: list[int | None]) -> bool:
    """Whether a mask [..., keys] is for fewer keys than there are: `keys` is [batch, (heads,) keys, size]."""
    covered, there = (mask or [None])[-1], keys[-2] if len(keys) > 1 else None
    return covered is not None and there is not None and 1 < covered < there


def _given(node: onnx.NodeProto, index: int) -> bool:
    return len(node.input) > index and bool(node.input[index])


def _over_cache(name: str, producers: dict[str, onnx.NodeProto]) -> bool:
    """Whether a tensor holds a cache's tokens behind which new ones stand."""
    pending, seen = [name], set()
    while pending:
        name = pending.pop()
        node = producers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type == "TensorScatter":
            return True
        if node.op_type == "Concat" and any(value and value not in producers for value in node.input):
            return True
        if node.op_type in _TRANSPARENT:
            pending += node.input
    return False


def _scatter(
    node: onnx.NodeProto, inputs: dict[str, onnx.ValueInfoProto], outputs: set[str], types: dict[str, int]
) -> Iterator[str]:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    mode = attributes["mode"].s.decode(errors="replace") if "mode" in attributes else "linear"
    if mode != "linear":
        yield f"TensorRT's cache update is linear, and the mode is {mode!r}"
    axis = attributes["axis"].i if "axis" in attributes else -2
    cache = inputs.get(node.input[0])
    if cache is None:
        yield f"TensorRT updates only inputs of the model as caches, and {node.input[0]!r} is computed"
        return
    if node.output[0] not in outputs:
        yield f"TensorRT updates only caches that are outputs of the model, and {node.output[0]!r} is not"
    shape = cache.type.tensor_type.shape.dim
    if len(shape) != 4 or axis not in (-2, 2):
        yield f"TensorRT's caches are [batch, heads, capacity, dim], updated along axis 2; here {len(shape)} and {axis}"
    elif not shape[2].HasField("dim_value"):
        yield f"the capacity of {node.input[0]!r}, its dimension 2, is dynamic; TensorRT needs a number"
    if types.get(node.input[0]) not in _CACHE_TYPES:
        name = onnx.TensorProto.DataType.Name(types.get(node.input[0], 0)).lower()
        yield f"TensorRT's caches are float32, float16 or bfloat16; {node.input[0]!r} is {name}"
