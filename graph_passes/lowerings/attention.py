"""Lowers attention over a cache to one CachedAttention node, which appends to the caches in place."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.ir.nodes import insert_behind, is_op, operand, register
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.patterns.attention.match import attributes, constants
from trt_nvfp4.graph_passes.patterns.attention.projections import split_source
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph, CacheAttention, Layout, Projection
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights, initializer, torch_dtype
from trt_nvfp4.graph_passes.weights.published_caches import published_cache_scales
from trt_nvfp4.plugins.ops import DOMAIN, OPS
from trt_nvfp4.plugins.ops.number_formats import e4m3_scale

OP = "CachedAttention"


def lower_attention(context: LoweringContext, subgraph: AttentionSubgraph, fp8_cache: bool) -> list[str]:
    """Replaces the nodes of `subgraph` by one node of its name; returns that name.

    With `fp8_cache`, scales by head, the checkpoint's or else from the statistics, make the caches E4M3 bytes; else
    they keep their type.
    """
    block = subgraph.attention
    assert block is not None
    graph, made = context.graph, context.made
    scales = _cache_scales(context.statistics, subgraph) if fp8_cache else None
    name, dtype = subgraph.name, block.query.value.dtype
    assert dtype is not None
    nodes: list[ir.Node] = []
    parts = [_flat(graph, name, part, block.head_dim, nodes) for part in (block.query, block.key, block.value)]
    concat = ir.node("Concat", parts, {"axis": -1}, name=f"{name}/qkv")
    width = (block.query.heads + 2 * block.key.heads) * block.head_dim
    _typed(concat.outputs[0], dtype, [*(parts[0].shape or ("batch", "new", 0))[:2], width])
    arrays = constants(block, torch_dtype(dtype), *(scales or ()))
    definition = OPS[OP]
    names = [formal.name for formal in definition.inputs[4:]]
    others = [
        _constant(graph, f"{name}/{formal}", array, made, shared=formal in ("cos", "sin"))
        for formal, array in zip(names, arrays, strict=True)
    ]
    node = ir.node(
        OP,
        [concat.outputs[0], *block.past, block.past_length, *others],
        definition.complete_attributes(**attributes(block), fp8_cache=int(scales is not None)),
        domain=DOMAIN,
        version=1,
        num_outputs=3,
        name=name,
    )
    nodes += [concat, node]
    sources = [part.value for part in (block.query, block.key, block.value)]
    insert_behind(graph, max(sources, key=_place(graph).__getitem__), nodes)
    y, *presents = node.outputs
    if block.result_layout != Layout.FLAT:
        y = _by_head(graph, name, block, y)
    for old, new in zip((block.result, *block.present), (y, *presents), strict=True):
        new.name, old.name = old.name, f"{old.name}/replaced"
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    if scales is not None:
        for value in (*block.past, *presents):
            value.type = ir.TensorType(ir.DataType.INT8)
    return [name]


def join_projections(graph: ir.Graph) -> None:
    """Take out what splits a projection into queries, keys and values that CachedAttention takes together."""
    for node in list(graph):
        if node.op_type != OP or node.domain != DOMAIN or not is_op(concat := operand(node, 0).producer(), "Concat"):
            continue
        whole = split_source([operand(concat, index) for index in range(len(concat.inputs))])
        if whole is not None:
            node.replace_input_with(0, whole)


def _cache_scales(
    statistics: Statistics | None, subgraph: AttentionSubgraph
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of keys and values [kv_heads]: the checkpoint's, or those that map the largest magnitude of each head to
    E4M3's largest number; None where neither is known."""
    if (published := published_cache_scales(subgraph)) is not None or statistics is None:
        return published
    arrays = [statistics.of(name).head_amax for name in subgraph.linear_inputs]
    key, value = (e4m3_scale(amax) for amax in arrays if amax is not None)
    return key, value


def _flat(graph: ir.Graph, name: str, part: Projection, head_dim: int, nodes: list[ir.Node]) -> ir.Value:
    """[batch, new, heads * head_dim]."""
    value = part.value
    if part.layout == Layout.FLAT:
        return value
    prefix = f"{name}/{value.name}"
    if part.layout == Layout.HEADS_FIRST:
        turn = ir.node("Transpose", [value], {"perm": [0, 2, 1, 3]}, name=f"{prefix}/by_token")
        nodes.append(turn)
        value = turn.outputs[0]
    shape = _shape(graph, f"{name}/flat_{part.heads}", [0, 0, part.heads * head_dim])
    flat = ir.node("Reshape", [value, shape], name=f"{prefix}/flat")
    nodes.append(flat)
    return flat.outputs[0]


def _by_head(graph: ir.Graph, name: str, block: CacheAttention, y: ir.Value) -> ir.Value:
    """y as [batch, heads, new, head_dim]."""
    y.name = f"{name}/flat"
    shape = _shape(graph, f"{name}/heads", [0, 0, block.query.heads, block.head_dim])
    wide = ir.node("Reshape", [y, shape], name=f"{name}/by_head")
    turned = ir.node("Transpose", [wide.outputs[0]], {"perm": [0, 2, 1, 3]}, name=f"{name}/heads_first")
    insert_behind(graph, y, [wide, turned])
    return turned.outputs[0]


def _constant(graph: ir.Graph, name: str, array: torch.Tensor, made: MadeWeights, shared: bool) -> ir.Value:
    """An initializer; tables are the same one for all layers that turn alike."""
    dtype = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}.get(
        array.dtype, ir.DataType.FLOAT
    )
    key = ("attention", tuple(array.shape), array.numpy().tobytes()) if shared else (name,)
    if key not in made:
        value = initializer(name, array, dtype)
        register(graph, value)
        made[key] = (value,)
    return made[key][0]


def _shape(graph: ir.Graph, name: str, sizes: Sequence[int]) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.val(name, const_value=ir.tensor(np.array(sizes, np.int64), name=name))
    register(graph, value)
    return value


def _typed(value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim]) -> None:
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)


def _place(graph: ir.Graph) -> dict[ir.Value, int]:
    place = dict.fromkeys(graph.inputs, -1)
    place |= {output: index for index, node in enumerate(graph) for output in node.outputs}
    return place
