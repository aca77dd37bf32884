"""Lowers the linears of a subgraph to TensorRT's own NVFP4: FP4 operands behind DequantizeLinear, fused with the GEMM.

Weights and activations are dequantized twice: the block scales by the tensor scale, the values by the block scales.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

from dataclasses import replace

import onnx.parser
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import insert_behind, register
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.lowerings.trt_moe import DOMAIN
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.products import ProductSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.values import initializer
from trt_nvfp4.graph_passes.weights.nvfp4 import Layout
from trt_nvfp4.graph_passes.weights.quantization import Quantization
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tensor_scale

QUANTIZE, DEQUANTIZE = "TRT_FP4DynamicQuantize", "DequantizeLinear"
# The first IR version with FP4.
_OLDEST_IR_VERSION = 11


def unsupported(subgraph: ProductSubgraph) -> Reason | None:
    """The Reason why TensorRT's own NVFP4 layers cannot compute the subgraph, or None if they can."""
    if (reason := subgraph.unaligned_k("NVFP4")) is not None:
        return reason
    for linear in subgraph.linears:
        if linear.x.shape is not None and len(linear.x.shape) not in (2, 3):
            return Reason(
                ReasonCode.RANK,
                f"TensorRT quantizes tensors of rank 2 or 3 to NVFP4: '{linear.x.name}' has {len(linear.x.shape)}",
            )
    return None


def lower(context: LoweringContext, subgraph: ProductSubgraph) -> list[str]:
    """Quantizes both operands of every product, whose inputs' ranges must be known; returns the multiplying nodes."""
    graph, quantized_inputs, names = context.graph, context.nvfp4_inputs, []
    context.model.ir_version = max(context.model.ir_version, _OLDEST_IR_VERSION)
    # A fused projection is one multiplication that two linears share.
    for linear in {linear.multiply: linear for linear in subgraph.linears}.values():
        node = linear.multiply
        if linear.x not in quantized_inputs:
            quantized_inputs[linear.x] = _quantized_input(graph, linear, context.amax[linear.observed])
        node.replace_input_with(1, _quantized_weight(graph, linear, context.quantization))
        node.replace_input_with(0, quantized_inputs[linear.x])
        names.append(node.name or "")
    return names


def _quantized_weight(graph: ir.Graph, linear: Linear, quantization: Quantization) -> ir.Value:
    """The second operand of the product, made anew from FP4 [N, K]."""
    node, weight = linear.multiply, linear.weight
    stored = get_const_tensor(weight.stored)
    assert stored is not None
    columns, rows = stored.shape.numpy() if weight.stored_transposed else reversed(stored.shape.numpy())
    # All of a fused projection; what scales the product stays where it is.
    whole = replace(linear, weight=replace(weight, rows=slice(None), scale=1.0, shape=(rows, columns)))
    prefix = f"{node.name}/weight"
    values, block_scales, scale = quantization.initializers(prefix, [[whole]], False, Layout.TENSORRT)
    for value in (values, block_scales, scale):
        register(graph, value)
    nodes = _dequantize(prefix, (values, block_scales, scale), weight.dtype)
    if not node.attributes.get_int("transB", 0):
        nodes.append(ir.node("Transpose", nodes[-1].outputs, {"perm": [1, 0]}, name=f"{prefix}.transpose"))
        nodes[-1].outputs[0].name = f"{prefix}.transposed"
    nodes[-1].outputs[0].type = ir.TensorType(weight.dtype)
    graph.insert_before(graph[0], nodes)
    return nodes[-1].outputs[0]


def _quantized_input(graph: ir.Graph, linear: Linear, amax: float) -> ir.Value:
    x = linear.x
    prefix = f"{x.name}.nvfp4"
    scale = initializer(f"{prefix}.tensor_scale", tensor_scale(torch.tensor(amax)), ir.DataType.FLOAT)
    register(graph, scale)
    attributes = {"axis": -1, "block_size": BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)}
    quantize = ir.node(
        QUANTIZE, [x, scale], attributes, domain=DOMAIN, num_outputs=2, name=f"{prefix}.quantize", version=1
    )
    for value, name, dtype in zip(
        quantize.outputs,
        (prefix, f"{prefix}.block_scales"),
        (ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN),
        strict=True,
    ):
        value.name, value.type = name, ir.TensorType(dtype)
    values, block_scales = quantize.outputs
    nodes = [quantize, *_dequantize(prefix, (values, block_scales, scale), linear.weight.dtype)]
    nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = x.type, x.shape
    insert_behind(graph, x, nodes)
    return nodes[-1].outputs[0]


def _dequantize(prefix: str, tensors: tuple[ir.Value, ir.Value, ir.Value], dtype: ir.DataType) -> list[ir.Node]:
    """Nodes from (values, block scales, tensor scale) to `dtype`.

    TensorRT wants a scale of the type that it dequantizes to, float32 here.
    """
    values, block_scales, scale = tensors
    scales = ir.node(DEQUANTIZE, [block_scales, scale], name=f"{prefix}.dequantize_scales")
    blocks = ir.node(
        DEQUANTIZE,
        [values, scales.outputs[0]],
        {"axis": -1, "block_size": BLOCK},
        domain=DOMAIN,
        version=1,
        name=f"{prefix}.dequantize",
    )
    cast = ir.node("Cast", blocks.outputs, {"to": int(dtype)}, name=f"{prefix}.cast")
    for node, name in ((scales, "float_scales"), (blocks, "dequantized"), (cast, "value")):
        node.outputs[0].name, node.outputs[0].type = f"{prefix}.{name}", ir.TensorType(ir.DataType.FLOAT)
    cast.outputs[0].type = ir.TensorType(dtype)
    return [scales, blocks, cast]


def functions() -> list[onnx.FunctionProto]:
    """Definitions of the operators of TensorRT's domain, for ONNX's reference evaluator; ONNX Runtime has no FP4.

    The second is ONNX's own of opset 23, under a name that models of older opsets may use too.
    """
    quantize = f"""<opset_import: ["": 23], domain: "{DOMAIN}">
    {QUANTIZE} <axis: int = -1, block_size: int = {BLOCK}, scale_type: int = {int(ir.DataType.FLOAT8E4M3FN)}>
    (x, scale) => (values, block_scales) {{
        last = Constant<value = int64[1] {{-1}}>()
        block = Constant<value = int64[2] {{-1, {BLOCK}}}>()
        zero = Constant<value = float {{0.0}}>()
        one = Constant<value = float {{1.0}}>()
        six = Constant<value = float {{6.0}}>()
        shape = Shape(x)
        lead = Shape<start = 0, end = -1>(x)
        by_block = Concat<axis = 0>(lead, block)
        by_row = Concat<axis = 0>(lead, last)
        x_float = Cast<to = {int(ir.DataType.FLOAT)}>(x)
        blocks = Reshape(x_float, by_block)
        magnitudes = Abs(blocks)
        amax = ReduceMax<keepdims = 1>(magnitudes, last)
        sixth = Div(amax, six)
        exact = Div(sixth, scale)
        rounded = Cast<to = {int(ir.DataType.FLOAT8E4M3FN)}>(exact)
        block_scales = Reshape(rounded, by_row)
        divisor = Cast<to = {int(ir.DataType.FLOAT)}>(rounded)
        inverse = Div(one, scale)
        factor = Div(inverse, divisor)
        scaled = Mul(blocks, factor)
        empty = Equal(divisor, zero)
        finite = Where(empty, zero, scaled)
        flat = Reshape(finite, shape)
        values = Cast<to = {int(ir.DataType.FLOAT4E2M1)}>(flat)
    }}"""
    dequantize = f"""<opset_import: ["": 23], domain: "{DOMAIN}">
    {DEQUANTIZE} <axis: int = -1, block_size: int = {BLOCK}> (x, scale) => (y) {{
        y = DequantizeLinear<axis: int = @axis, block_size: int = @block_size>(x, scale)
    }}"""
    return [onnx.parser.parse_function(text) for text in (quantize, dequantize)]
