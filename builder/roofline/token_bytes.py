"""Bytes that a decoder reads for each generated token, and the tokens per second that memory allows at most."""

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.builder.model.decoder_contract import Decoder
from trt_nvfp4.builder.records.contents import TokenBytes
from trt_nvfp4.builder.roofline.predict import Limits
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, constant_source, is_op
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.kinds.kind import KEPT
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph

# Bytes of a cached value, by the contract's names of types.
_CACHED = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Constants that belong to no subgraph.
OTHERS = "norms, tables, biases and others"


def token_bytes(model: SourceModel, plan: Plan, decoder: Decoder, limits: Limits) -> TokenBytes:
    """For a plan of `model`, the decoder as it is planned (in 16 bits already where the plan says so).

    The caches count in full: TensorRT's attention reads their whole capacity. States count twice, read and written.
    One row of a table that ids are looked up in counts.
    """
    quantized: dict[str, float] = {}
    kept: dict[str, float] = {}
    counted: set[str] = set()
    # A linear of an MLP that is replaced one by one stands in the plan twice.
    for entry in sorted(plan.subgraphs, key=lambda entry: entry.decision == Decision.KEEP):
        if entry.decision == Decision.BY_HAND:
            quantized[entry.decision] = quantized.get(entry.decision, 0.0) + _constants(model.graph, entry)
            counted.update(entry.nodes)
        if "out_features" not in entry.shapes or not counted.isdisjoint(entry.nodes):
            continue
        counted.update(entry.nodes)
        if entry.lowering.weight_bytes is None:
            kept[entry.name] = _weight_bytes(entry)
        else:
            quantized[entry.decision] = quantized.get(entry.decision, 0.0) + _weight_bytes(entry)
    if others := sum(_other_constants(model.graph, counted)):
        kept[OTHERS] = others
    item = _CACHED.get(decoder.cache_dtype, 1)
    sizes = zip(decoder.kv_heads, decoder.head_dim, decoder.value_head_dim, strict=True)
    cache_bytes = float(item * decoder.capacity * sum(heads * (key + value) for heads, key, value in sizes))
    state_bytes = 2.0 * decoder.state_bytes  # read and written
    total = sum(quantized.values()) + sum(kept.values()) + cache_bytes + state_bytes
    return {
        "gpu": limits.gpu,
        "quantized": quantized,
        "kept": dict(sorted(kept.items(), key=lambda item: -item[1])),
        "cache_tokens": decoder.capacity,
        "cache_bytes": cache_bytes,
        "state_bytes": state_bytes,
        "total": total,
        "at_most": limits.bandwidth / max(total, 1.0),
    }


def _constants(graph: ir.Graph, entry: PlannedSubgraph) -> float:
    """Bytes of what a node put in by hand reads; all experts of a mixture."""
    nodes = (node for node in graph if node.name in entry.nodes)
    tensors = (get_const_tensor(value) for node in nodes for value in node.inputs if value is not None)
    return float(sum(tensor.nbytes for tensor in tensors if tensor is not None))


def _weight_bytes(entry: PlannedSubgraph) -> float:
    each = entry.lowering.weight_bytes
    return kind_of(entry).weights(entry.shapes, 1)[0] * (KEPT[entry.dtype][0] if each is None else each)


def _other_constants(graph: ir.Graph, planned: set[str]) -> Iterator[float]:
    """Bytes of every constant of floating-point numbers that no planned node multiplies by."""
    inside, whole, looked_up = set(), set(), set()
    for node in graph.all_nodes():
        for index, value in enumerate(node.inputs):
            source = None if value is None else constant_source(value)
            if source is None:
                continue
            if node.name in planned:
                inside.add(source[0])
            elif is_op(node, "Gather") and index == 0:
                looked_up.add(source[0])
            elif not is_op(node, "Cast", "Identity", "Transpose"):
                whole.add(source[0])
    for value in (whole | looked_up) - inside:
        tensor = get_const_tensor(value)
        if tensor is not None and tensor.dtype in FLOATS:
            yield tensor.nbytes if value in whole else tensor.nbytes / max(tensor.shape.numpy()[0], 1)
    for value in inside & looked_up:
        # The embedding behind a head that is quantized.
        tensor = get_const_tensor(value)
        if tensor is not None and tensor.dtype in FLOATS:
            yield tensor.nbytes / max(tensor.shape.numpy()[0], 1)
