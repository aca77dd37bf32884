"""Finds decoder layers among the subgraphs of a model: attention, its projections, and the MLP behind."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand
from trt_nvfp4.graph_passes.patterns.attention.projections import split_source
from trt_nvfp4.graph_passes.patterns.isolation import escaping_use
from trt_nvfp4.graph_passes.patterns.names import module_path
from trt_nvfp4.graph_passes.patterns.rms_norm import match_rms_norm
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph, CacheAttention, Layout
from trt_nvfp4.graph_passes.subgraphs.decoder_layer import DecoderLayer, DecoderLayerSubgraph
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp, Moe, RMSNorm
from trt_nvfp4.graph_passes.subgraphs.products import GatedMlpSubgraph, LinearSubgraph, MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.plugins.ops.nvfp4_moe_decoder import SCORINGS

_SHAPING = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_SCORINGS = [scoring.name.lower() for scoring in SCORINGS]
_CACHE = re.compile(r"past_key_values\.(\d+)\.key")


def decoder_layers(
    found: Sequence[Subgraph], position: Mapping[ir.Node, int], taken: set[str]
) -> Iterator[tuple[int, DecoderLayerSubgraph]]:
    """(place in the graph, subgraph) of the layer around every attention over a cache in `found`, the model's other
    subgraphs; a layer that NVFP4Decoder does not compute carries the reason. `taken` are names in use."""
    finder = _Finder(found)
    for attention in found:
        if not isinstance(attention, AttentionSubgraph) or attention.attention is None:
            continue
        layer, unsupported = None, None
        try:
            layer = finder.layer(attention.name, attention.attention)
        except ValueError as error:
            unsupported = Reason(ReasonCode.NOT_REPLACEABLE, str(error))
        yield _subgraph(attention, attention.attention, layer, unsupported, position, taken)


def _subgraph(
    attention: AttentionSubgraph,
    block: CacheAttention,
    layer: DecoderLayer | None,
    unsupported: Reason | None,
    position: Mapping[ir.Node, int],
    taken: set[str],
) -> tuple[int, DecoderLayerSubgraph]:
    nodes = block.nodes if layer is None else layer.nodes
    shapes = {name: attention.shapes[name] for name in ("heads", "kv_heads", "head_dim", "capacity", "window")}
    if layer is not None:
        rows, columns = layer.mlp.up.weight.shape
        shapes = {"hidden_features": columns, "intermediate_features": rows, **shapes}
        if layer.moe is not None:
            shapes |= {"experts": len(layer.moe.experts), "top_k": layer.moe.routing.top_k}
    subgraph = DecoderLayerSubgraph(
        name=_name(block.core, taken),
        nodes=tuple(str(node.name) for node in nodes),
        input=attention.input if layer is None else layer.x.name or "",
        output=attention.output if layer is None else layer.y.name or "",
        shapes=shapes,
        activation="" if layer is None else layer.mlp.activation,
        dtype=attention.dtype,
        unsupported=unsupported,
        layer=layer,
    )
    return min(position[node] for node in nodes), subgraph


def _name(core: ir.Node, taken: set[str]) -> str:
    """The path of the module that holds the attention's, made unique."""
    base = re.sub(r"[^\w.]+", "_", ".".join(module_path(core)[:-1])) or "decoder_layer"
    name, count = base, 0
    while name in taken:
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    return name


@dataclass(frozen=True)
class _Rows:
    """The part of a layer behind its attention, from the output of `norm` to y: `mlp` (the first expert of a mixture)
    of `subgraph`."""

    mlp: Mlp
    norm: RMSNorm
    subgraph: str
    y: ir.Value
    nodes: tuple[ir.Node, ...]
    moe: Moe | None = None


class _Finder:
    """Finds the subgraph that computes or reads a value, among those that can be replaced."""

    def __init__(self, found: Sequence[Subgraph]) -> None:
        free = [subgraph for subgraph in found if subgraph.can_be_replaced]
        linears = [(linear, sub) for sub in free if isinstance(sub, LinearSubgraph) for linear in sub.projections]
        self._computes = {linear.y: subgraph for linear, subgraph in linears}
        self._reads = {linear.x: (linear, subgraph) for linear, subgraph in linears}
        self._mlps: dict[ir.Value, _Rows] = {}
        for subgraph in free:
            if (rows := _rows(subgraph)) is not None:
                self._mlps[rows.norm.x] = rows

    def layer(self, name: str, attention: CacheAttention) -> DecoderLayer:
        """The layer around the subgraph `name`, an attention. Raises ValueError where it is unsupported."""
        number = _number(attention)
        qkv, between = self._projection(attention)
        source = qkv.projections[0].x
        features = qkv.projections[0].weight.shape[1]
        norm = match_rms_norm(source, features)
        if norm is None:
            raise ValueError("there is no RMSNorm in front of its projections")
        output, output_subgraph = self._output(attention)
        x = norm.x
        first = _residual(output.y, x, "attention's")
        middle = first.outputs[0]
        if middle not in self._mlps:
            raise ValueError("no RMSNorm and gated MLP or mixture that can be replaced follow its attention")
        behind = self._mlps[middle]
        second = _residual(behind.y, middle, "MLP's")
        y = second.outputs[0]
        nodes = (
            *norm.nodes,
            *(node for linear in qkv.projections for node in linear.nodes),
            *(*between, *attention.nodes, *output.nodes, first),
            *(*behind.norm.nodes, *behind.nodes, second),
        )
        layer = DecoderLayer(
            number=number,
            x=x,
            y=y,
            norms=(norm, behind.norm),
            attention=attention,
            mlp=behind.mlp,
            parts=(qkv.name, name, output_subgraph.name, behind.subgraph),
            nodes=tuple(dict.fromkeys(nodes)),
            moe=behind.moe,
        )
        _check(layer, features)
        return layer

    def _projection(self, attention: CacheAttention) -> tuple[LinearSubgraph, tuple[ir.Node, ...]]:
        """The linear that computes queries, keys and values together, and the nodes that split it."""
        parts = (attention.query, attention.key, attention.value)
        if any(part.layout != Layout.FLAT for part in parts):
            raise ValueError("its queries, keys and values are not parts of one projection")
        values = [part.value for part in parts]
        whole = split_source(values)
        subgraph = self._computes.get(values[0] if whole is None else whole)
        together = tuple(values) if whole is None else (whole,)
        if subgraph is None or tuple(linear.y for linear in subgraph.projections) != together:
            raise ValueError("its queries, keys and values are not those of linears of one input, in this order")
        splits = () if whole is None else tuple(node for value in values if (node := value.producer()) is not None)
        return subgraph, splits

    def _output(self, attention: CacheAttention) -> tuple[Linear, LinearSubgraph]:
        if attention.result_layout != Layout.FLAT or attention.result not in self._reads:
            raise ValueError("no projection that can be replaced follows its attention")
        linear, subgraph = self._reads[attention.result]
        if len(subgraph.projections) != 1:
            raise ValueError("several projections read its attention")
        return linear, subgraph


def _rows(subgraph: Subgraph) -> _Rows | None:
    """The part of a layer that a gated MLP or a mixture can be, with an RMSNorm in front; None for other subgraphs."""
    if isinstance(subgraph, MoeSubgraph) and subgraph.moe is not None:
        return _mixture(subgraph.name, subgraph.moe)
    if not isinstance(subgraph, GatedMlpSubgraph) or len(subgraph.blocks) > 1 or subgraph.blocks[0].norm is not None:
        return None
    mlp = subgraph.blocks[0].mlp
    norm = match_rms_norm(mlp.x, mlp.up.weight.shape[1])
    return None if norm is None else _Rows(mlp, norm, subgraph.name, mlp.y, mlp.nodes)


def _mixture(subgraph: str, moe: Moe) -> _Rows | None:
    """A mixture whose router and experts read the same norm, and what only shapes its input and output."""
    x, inputs = _source(moe.x)
    router_x, router_inputs = _source(moe.router.x)
    norm = match_rms_norm(x, moe.router.weight.shape[1])
    if norm is None or router_x is not x:
        return None
    y, outputs = moe.y, list[ir.Node]()
    while len(users := y.consumers()) == 1 and not y.is_graph_output() and is_op(users[0], *_SHAPING):
        outputs.append(users[0])
        y = users[0].outputs[0]
    between = [node for node in _source(moe.logits)[1] if node not in moe.router.nodes]
    nodes = (*inputs, *router_inputs, *moe.router.nodes, *between, *moe.nodes, *outputs)
    return _Rows(moe.experts[0], norm, subgraph, y, (*nodes, *_shapes_for(nodes)), moe)


def _shapes_for(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """The nodes that compute shapes for `nodes` and for no others."""
    own, found = set(nodes), list[ir.Node]()
    waiting = [value for node in nodes if is_op(node, "Reshape") for value in node.inputs[1:]]
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or node in own or any(user not in own for out in node.outputs for user in out.consumers()):
            continue
        own.add(node)
        found.append(node)
        if not is_op(node, "Shape"):
            waiting += node.inputs
    return found


def _source(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """The value that `value` holds in another shape or type, and the nodes between, in order."""
    nodes: list[ir.Node] = []
    while is_op(node := value.producer(), *_SHAPING):
        nodes.insert(0, node)
        value = operand(node, 0)
    return value, nodes


def _number(attention: CacheAttention) -> int:
    found = [_CACHE.fullmatch(value.name or "") for value in attention.past[:1]]
    if found[0] is None or not all(value.is_graph_input() for value in attention.past):
        raise ValueError("its caches are not inputs past_key_values.LAYER.key and .value")
    if not all(value.is_graph_output() for value in attention.present):
        raise ValueError("its caches are not outputs of the model")
    return int(found[0][1])


def _residual(y: ir.Value, x: ir.Value, whose: str) -> ir.Node:
    users = y.consumers()
    if len(users) != 1 or y.is_graph_output() or not is_op(users[0], "Add") or x not in users[0].inputs:
        raise ValueError(f"its {whose} output is not added to the input of the norm in front")
    return users[0]


def _check(layer: DecoderLayer, features: int) -> None:
    """Raises ValueError for what NVFP4Decoder does not compute."""
    attention, mlp = layer.attention, layer.mlp
    norms = [*layer.norms, *(attention.norms or ())]
    if any(one.epsilon != other.epsilon for one, other in pairwise(norms)):
        raise ValueError("its norms have different epsilons")
    if attention.sinks is not None:
        raise ValueError("its attention has sinks, which NVFP4Decoder does not have")
    if {mlp.up.weight.shape[1], mlp.down.weight.shape[0]} != {features}:
        raise ValueError("its MLP has another width than its attention")
    ends = (mlp.x, mlp.y)
    if layer.moe is not None:
        _check_mixture(layer.moe)
        ends = (layer.moe.x, layer.moe.y)
    elif mlp.flattens:
        raise ValueError("its MLP flattens batch and tokens")
    if len({value.dtype for value in (layer.x, layer.y, *ends, attention.result, attention.past[0])}) != 1:
        raise ValueError("its residuals, norms and products have different types")
    # Weights that are stored in the activations' type lose nothing where the model multiplies them in another.
    if layer.moe is not None and layer.moe.router.weight.stored.dtype != layer.x.dtype:
        raise ValueError("its router has weights of another type than its activations")
    inner = [value for node in layer.nodes for value in node.outputs]
    kept = {layer.y, *attention.present}
    if (reason := escaping_use((value for value in inner if value not in kept), set(layer.nodes))) is not None:
        raise ValueError(f"an intermediate is used elsewhere: {reason}")


def _check_mixture(moe: Moe) -> None:
    """Raises ValueError for a mixture that NVFP4MoEDecoder does not compute."""
    routing, first = moe.routing, moe.experts[0]
    if moe.shared is not None:
        raise ValueError("its mixture has a shared expert, which NVFP4MoEDecoder does not have")
    if routing.given is not None or routing.scoring not in _SCORINGS:
        raise ValueError(f"its router's scoring, {routing.scoring}, is not one of {', '.join(_SCORINGS)}")
    if routing.correction_bias is not None or routing.n_group > 1 or moe.router.bias is not None:
        raise ValueError("its router has biases or groups, which NVFP4MoEDecoder does not have")
    if routing.scale_input or first.gate is None:
        raise ValueError("its experts are not gated, or their inputs are weighed")
    if _source(moe.logits)[0] is not moe.router.y:
        raise ValueError("its router's logits are changed before experts are chosen by them")
