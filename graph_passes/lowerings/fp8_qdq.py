"""Lowers the linears of a subgraph to FP8: standard Q/DQ nodes, which TensorRT fuses with the GEMM.

TensorRT moves the slices that take a packed product apart, such as that of queries, keys and values, into the
weight. It then dequantizes the weight on every run, as the scales are sliced too, and multiplies in 16 bits. There the
weight has one scale, a power of two, and a Mul behind the product has what the channels differ by.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common import fp8
from trt_nvfp4.graph_passes.ir.nodes import insert_behind, is_op, operand, optional_operand, register
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext, Quantized
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, check_not_empty, constant, torch_dtype
from trt_nvfp4.graph_passes.weights.published_fp8 import published_scales
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX

_CHUNK_VALUES = 1 << 23
# Between a packed product and what takes it apart.
_MOVED_THROUGH = ("Add", "Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_TAKES_APART = ("Gather", "Slice", "Split")


def unsupported_fp8(subgraph: Subgraph) -> Reason | None:
    """The Reason why the linears of the subgraph cannot be FP8: one weight has scales along one axis."""
    transposed: dict[ir.Value, bool] = {}
    for weight in (linear.weight for linear in subgraph.linears):
        if transposed.setdefault(weight.stored, weight.stored_transposed) != weight.stored_transposed:
            return Reason(
                ReasonCode.ORIENTATION,
                f"its linears read weight '{weight.stored.name}' in both orientations, and FP8 scales serve one",
            )
    return None


def lower_fp8(context: LoweringContext, subgraph: Subgraph) -> list[str]:
    """Quantizes weights per output channel, and inputs per tensor where their range is known; returns the multiplying
    nodes. Without statistics only the weights are FP8.
    """
    graph, quantized, names = context.graph, context.fp8_operands, []
    # A fused projection is one multiplication that two linears share.
    for linear in {linear.multiply: linear for linear in subgraph.linears}.values():
        node = linear.multiply
        is_packed = _is_packed(linear)
        node.replace_input_with(1, _quantized_weight(graph, linear, operand(node, 1), is_packed, quantized))
        if is_packed:
            _scale_behind(graph, linear)
        if (largest := context.amax.get(linear.observed)) is not None:
            if (linear.x, False) not in quantized:
                quantized[linear.x, False] = _quantize_input(graph, linear, largest)
            node.replace_input_with(0, quantized[linear.x, False])
        names.append(node.name or "")
    return names


def _is_packed(linear: Linear) -> bool:
    """Whether slices take the product apart, and its scales can stand behind it: in front of a bias that Gemm adds as
    it is."""
    if optional_operand(linear.multiply, 2) is not None and linear.multiply.attributes.get_float("beta", 1.0) != 1:
        return False
    pending, seen = [linear.multiply.outputs[0]], set()
    while pending:
        value = pending.pop()
        for node in value.consumers():
            if is_op(node, *_TAKES_APART) and node.inputs[0] is value:
                return True
            if is_op(node, *_MOVED_THROUGH) and node not in seen:
                seen.add(node)
                pending.append(node.outputs[0])
    return False


def _quantized_weight(
    graph: ir.Graph, linear: Linear, value: ir.Value, is_packed: bool, quantized: Quantized
) -> ir.Value:
    """`value`, the linear's weight or what its `weight_nodes` make of it, made anew from FP8: others may read it."""
    if (value, is_packed) not in quantized:
        if value is linear.weight.stored:
            node = _dequantize_weight(graph, linear, is_packed)
            graph.insert_before(graph[0], node)
        else:
            step = next(node for node in linear.weight_nodes if value in node.outputs)
            source = _quantized_weight(graph, linear, operand(step, 0), is_packed, quantized)
            name = f"{value.name}.fp8"
            node = ir.node(step.op_type, [source], step.attributes, name=name)
            node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
            insert_behind(graph, source, [node])
        quantized[value, is_packed] = node.outputs[0]
    return quantized[value, is_packed]


def _scale_behind(graph: ir.Graph, linear: Linear) -> None:
    """Multiplies the product of a weight with one scale by what its channels differ by, in front of the bias."""
    node = linear.multiply
    scales = _channel_scales(linear)
    dtype = linear.weight.dtype
    factors = (scales.astype(np.float32) / _common_scale(scales)).astype(dtype.numpy())
    factor = ir.Tensor(factors, dtype=dtype, name=f"{linear.weight.stored.name}.fp8.factors")
    behind = [ir.node("Mul", [node.outputs[0], _register(graph, factor)], name=f"{node.name}.scale")]
    if (bias := optional_operand(node, 2)) is not None:
        node.resize_inputs(2)
        behind.append(ir.node("Add", [behind[0].outputs[0], bias], name=f"{node.name}.bias"))
    product, result = node.outputs[0], behind[-1].outputs[0]
    for new in behind:
        new.outputs[0].type, new.outputs[0].shape = product.type, product.shape
    product.replace_all_uses_with(result, replace_graph_outputs=True)
    behind[0].replace_input_with(0, product)
    # By its name it is found in the original model.
    result.name, product.name = product.name, f"{product.name}.unscaled"
    if len(behind) > 1:
        behind[0].outputs[0].name = f"{result.name}.scaled"
    graph.insert_after(node, behind)


def _common_scale(scales: np.ndarray) -> float:
    """A power of two near the largest, so that dequantizing with it rounds nothing."""
    return float(2.0 ** math.floor(math.log2(float(scales.max()))))


def _dequantize_weight(graph: ir.Graph, linear: Linear, is_packed: bool) -> ir.Node:
    """The stored weight as an FP8 initializer, in front of DequantizeLinear."""
    stored = linear.weight.stored
    tensor = get_const_tensor(stored)
    assert tensor is not None
    axis = 1 if linear.weight.stored_transposed else 0
    scale = _channel_scales(linear)
    exact = torch.from_numpy(scale.astype(np.float32))

    def quantized() -> Iterator[torch.Tensor]:
        start = 0
        for chunk in _chunks(stored):
            yield fp8.quantize(chunk, exact if axis == 1 else exact[start : start + len(chunk)], axis)
            start += len(chunk)

    if is_packed:
        scale = np.array(_common_scale(scale), scale.dtype)
    prefix = f"{stored.name}.fp8"
    weight = StreamedTensor(prefix, ir.DataType.FLOAT8E4M3FN, tuple(tensor.shape.numpy()), quantized)
    inputs = [
        _register(graph, weight),
        _register(graph, ir.Tensor(scale, dtype=tensor.dtype, name=f"{prefix}.scale")),
        _register(graph, ir.Tensor(np.zeros(scale.shape, ml_dtypes.float8_e4m3fn), name=f"{prefix}.zero_point")),
    ]
    attributes = {} if is_packed else {"axis": axis}
    dequantize = ir.node("DequantizeLinear", inputs, attributes, name=f"{prefix}.dequantize")
    dequantize.outputs[0].name = f"{prefix}.dequantized"
    dequantize.outputs[0].type, dequantize.outputs[0].shape = ir.TensorType(tensor.dtype), weight.shape
    return dequantize


def _channel_scales(linear: Linear) -> np.ndarray:
    """The scales of the output channels, in the type of the stored weight."""
    check_not_empty(linear.weight)
    stored = linear.weight.stored
    tensor = get_const_tensor(stored)
    assert tensor is not None
    # All rows of the stored weight, a packed one too.
    published = published_scales(replace(linear.weight, rows=slice(None), scale=1.0))
    if published is not None:
        return published.numpy().astype(tensor.dtype.numpy())
    if linear.weight.stored_transposed:
        channel_amax = torch.stack([chunk.abs().amax(0) for chunk in _chunks(stored)]).amax(0)
    else:
        channel_amax = torch.cat([chunk.abs().amax(1) for chunk in _chunks(stored)])
    if not torch.isfinite(channel_amax).all():
        raise ModelError(f"weight '{stored.name}' holds NaN or Inf and cannot be quantized; repair the checkpoint")
    return _scale(channel_amax, tensor.dtype)


def _chunks(stored: ir.Value) -> Iterator[torch.Tensor]:
    """The weight in float32, some rows at a time."""
    array = constant(stored)
    step = max(1, _CHUNK_VALUES // array.shape[1])
    for start in range(0, array.shape[0], step):
        yield as_torch(array[start : start + step]).float()


def _scale(amax: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """The scales that map `amax` to FP8's largest value, in the type of what is dequantized, never 0."""
    return (amax / E4M3_MAX).clamp_min(torch.finfo(torch_dtype(dtype)).tiny).numpy().astype(dtype.numpy())


def _quantize_input(graph: ir.Graph, linear: Linear, amax: float) -> ir.Value:
    x = linear.x
    scale = _scale(torch.tensor(amax), linear.weight.dtype)
    prefix = f"{x.name}.fp8"
    operands = [
        _register(graph, ir.Tensor(scale, dtype=linear.weight.dtype, name=f"{prefix}.scale")),
        _register(graph, ir.Tensor(np.zeros((), ml_dtypes.float8_e4m3fn), name=f"{prefix}.zero_point")),
    ]
    quantize = ir.node("QuantizeLinear", [x, *operands], name=f"{prefix}.quantize")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], *operands], name=f"{prefix}.dequantize")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{prefix}.quantized", f"{prefix}.dequantized"
    quantize.outputs[0].type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    dequantize.outputs[0].type = x.type
    quantize.outputs[0].shape = dequantize.outputs[0].shape = x.shape
    insert_behind(graph, x, [quantize, dequantize])
    return dequantize.outputs[0]


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.val(tensor.name, const_value=tensor)
    register(graph, value)
    return value
