"""Lowers the linears of a subgraph to FP8: standard Q/DQ nodes, which TensorRT fuses with the GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common import fp8
from trt_nvfp4.graph_passes.ir.nodes import insert_behind, operand, register
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.subgraphs.types import Linear, Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, check_not_empty, constant, torch_dtype
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX

_CHUNK_VALUES = 1 << 23


def fp8_obstacle(subgraph: Subgraph) -> str | None:
    """Why the linears of the subgraph, no "moe", cannot be FP8: one weight has scales of one axis."""
    transposed: dict[ir.Value, bool] = {}
    for weight in (linear.weight for linear in subgraph.linears):
        if transposed.setdefault(weight.stored, weight.stored_transposed) != weight.stored_transposed:
            return f"its linears read weight '{weight.stored.name}' in both orientations, and FP8 scales serve one"
    return None


def lower_fp8(
    graph: ir.Graph, subgraph: Subgraph, amax: Mapping[str, float], quantized: dict[ir.Value, ir.Value]
) -> list[str]:
    """Quantizes weights per output channel, and inputs per tensor where `amax` has them; returns the multiplying nodes.

    Without statistics only the weights are FP8. `quantized` collects operands, which subgraphs may share.
    """
    names = []
    # A fused projection is one multiplication that two linears share.
    for linear in {linear.multiply: linear for linear in subgraph.linears}.values():
        node = linear.multiply
        node.replace_input_with(1, _quantized_weight(graph, linear, operand(node, 1), quantized))
        if (largest := amax.get(linear.observed)) is not None:
            if linear.x not in quantized:
                quantized[linear.x] = _quantize_input(graph, linear, largest)
            node.replace_input_with(0, quantized[linear.x])
        names.append(node.name or "")
    return names


def _quantized_weight(
    graph: ir.Graph, linear: Linear, value: ir.Value, quantized: dict[ir.Value, ir.Value]
) -> ir.Value:
    """`value`, the linear's weight or what its `weight_nodes` make of it, made anew from FP8: others may read it."""
    if value not in quantized:
        if value is linear.weight.stored:
            node = _dequantize_weight(graph, linear)
            graph.insert_before(graph[0], node)
        else:
            step = next(node for node in linear.weight_nodes if value in node.outputs)
            source = _quantized_weight(graph, linear, operand(step, 0), quantized)
            name = f"{value.name}.fp8"
            node = ir.node(step.op_type, [source], step.attributes, name=name)
            node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
            insert_behind(graph, source, [node])
        quantized[value] = node.outputs[0]
    return quantized[value]


def _dequantize_weight(graph: ir.Graph, linear: Linear) -> ir.Node:
    """The stored weight as an FP8 initializer, in front of DequantizeLinear."""
    check_not_empty(linear.weight)
    stored = linear.weight.stored
    tensor = get_const_tensor(stored)
    assert tensor is not None
    rows, columns = tensor.shape.numpy()
    axis = 1 if linear.weight.stored_transposed else 0

    def chunks() -> Iterator[torch.Tensor]:
        array = constant(stored)
        step = max(1, _CHUNK_VALUES // columns)
        for start in range(0, rows, step):
            yield as_torch(array[start : start + step]).float()

    if axis == 0:
        channel_amax = torch.cat([chunk.abs().amax(1) for chunk in chunks()])
    else:
        channel_amax = torch.stack([chunk.abs().amax(0) for chunk in chunks()]).amax(0)
    if not torch.isfinite(channel_amax).all():
        raise ModelError(f"weight '{stored.name}' holds NaN or Inf and cannot be quantized; repair the checkpoint")
    scale = _scale(channel_amax, tensor.dtype)
    exact = torch.from_numpy(scale.astype(np.float32))

    def quantized() -> Iterator[torch.Tensor]:
        start = 0
        for chunk in chunks():
            yield fp8.quantize(chunk, exact if axis == 1 else exact[start : start + len(chunk)], axis)
            start += len(chunk)

    prefix = f"{stored.name}.fp8"
    weight = StreamedTensor(prefix, ir.DataType.FLOAT8E4M3FN, (rows, columns), quantized)
    inputs = [
        _register(graph, weight),
        _register(graph, ir.Tensor(scale, dtype=tensor.dtype, name=f"{prefix}.scale")),
        _register(graph, ir.Tensor(np.zeros(scale.shape, ml_dtypes.float8_e4m3fn), name=f"{prefix}.zero_point")),
    ]
    dequantize = ir.node("DequantizeLinear", inputs, {"axis": axis}, name=f"{prefix}.dequantize")
    dequantize.outputs[0].name = f"{prefix}.dequantized"
    dequantize.outputs[0].type, dequantize.outputs[0].shape = ir.TensorType(tensor.dtype), weight.shape
    return dequantize


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
