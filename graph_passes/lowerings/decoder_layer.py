"""Makes one NVFP4Decoder or NVFP4MoEDecoder of consecutive decoder layers whose parts have been lowered."""

from collections.abc import Iterator, Mapping, MutableSequence, Sequence

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.common.cache_names import stacked_names
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.ir.nodes import insert_behind, operand, register
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.subgraphs.decoder_layer import DecoderLayer, DecoderLayerSubgraph
from trt_nvfp4.graph_passes.subgraphs.parts import RMSNorm
from trt_nvfp4.graph_passes.subgraphs.values import Matrix, as_torch, initializer, norm_weight
from trt_nvfp4.plugins.ops import DOMAIN, OPS, Activation

DENSE, MIXTURE = "NVFP4Decoder", "NVFP4MoEDecoder"
_PARTS = ("weight", "scales", "tensor_scale", "bias")
_LINEAR = ("weight", "weight_scales", "weight_tensor_scale", "bias")
# The decoder's input, and which part of the layer has it by which name.
_CONSTANTS = {
    **{name: (1, name) for name in ("q_norm_weight", "k_norm_weight", "key_scale", "value_scale")},
    **{f"qkv_{ours}": (0, theirs) for ours, theirs in zip(_PARTS, _LINEAR, strict=True)},
    **{f"output_{ours}": (2, theirs) for ours, theirs in zip(_PARTS, _LINEAR, strict=True)},
    **{f"up_{part}": (3, f"gate_up_{part}") for part in _PARTS},
    **{f"down_{part}": (3, f"down_{part}") for part in _PARTS},
}


def fuse_layers(graph: ir.Graph, subgraphs: Sequence[DecoderLayerSubgraph], realized: dict[str, list[str]]) -> None:
    """Replaces runs of consecutive equal layers by one node each, and their caches by one input and one output.

    `realized` holds the names of the nodes of their parts; afterwards those of the new nodes for layers and parts.

    Raises CalibrationError where a checkpoint's scales keep a layer's projections apart.
    """
    nodes = {node.name: node for node in graph}
    layers = {subgraph.name: subgraph.layer for subgraph in subgraphs if subgraph.layer is not None}
    # The last run first: the output of each is still the input that the next one was found with.
    for run in reversed(list(_runs(layers, nodes, realized))):
        node = _fuse(graph, run, nodes, realized)
        for name, layer in run.items():
            for part in (name, *layer.parts):
                realized[part] = [str(node.name)]


def _runs(
    layers: Mapping[str, DecoderLayer], nodes: Mapping[str | None, ir.Node], realized: Mapping[str, list[str]]
) -> Iterator[dict[str, DecoderLayer]]:
    run: dict[str, DecoderLayer] = {}
    for name, layer in sorted(layers.items(), key=lambda item: item[1].number):
        if run:
            before = list(run.values())[-1]
            alike = _fp8(layer, nodes, realized) == _fp8(before, nodes, realized)
            fresh = all(layer.weights.isdisjoint(other.weights) for other in run.values())
            if not (layer.continues(before) and alike and fresh):
                yield run
                run = {}
        run[name] = layer
    if run:
        yield run


def _fp8(layer: DecoderLayer, nodes: Mapping[str | None, ir.Node], realized: Mapping[str, list[str]]) -> int:
    return nodes[realized[layer.parts[1]][0]].attributes["fp8_cache"].as_int()


def _fuse(
    graph: ir.Graph,
    run: Mapping[str, DecoderLayer],
    nodes: Mapping[str | None, ir.Node],
    realized: Mapping[str, list[str]],
) -> ir.Node:
    name, layers = next(iter(run)), list(run.values())
    first, last = layers[0], layers[-1]
    parts = []
    for subgraph, layer in run.items():
        for part in layer.parts:
            if len(realized[part]) != 1:
                raise CalibrationError(
                    f"layer '{subgraph}' cannot be part of one launch: the checkpoint has the linears of '{part}' with "
                    "scales of their own; plan keep for the layer"
                )
        parts.append([nodes[realized[part][0]] for part in layer.parts])
    op = DENSE if first.moe is None else MIXTURE
    definition = OPS[op]
    attention = parts[0][1]
    inputs: dict[str, ir.Value] = {
        "x": first.x,
        "past": _stack_caches(graph, layers),
        **{port: _input(attention, port) for port in ("past_length", "cos", "sin")},
        "attention_norm_weight": _norms(graph, name, "attention", [layer.norms[0] for layer in layers], first),
        "mlp_norm_weight": _norms(graph, name, "mlp", [layer.norms[1] for layer in layers], first),
        **{
            port: _stacked(graph, f"{name}/{port}", [_input(part[index], theirs) for part in parts])
            for port, (index, theirs) in _CONSTANTS.items()
        },
    }
    kept = ("heads", "rope", "qk_norm", "fp8_cache", "window", "scale", "softcap")
    attributes = {key: attention.attributes[key].value for key in kept}
    if first.moe is not None:
        inputs["router_weight"] = _routers(graph, f"{name}/router_weight", layers)
        routed = ("top_k", "scoring", "renormalize", "scaling_factor")
        attributes |= {key: parts[0][3].attributes[key].value for key in routed}
    node = ir.node(
        op,
        [inputs[formal.name] for formal in definition.inputs],
        definition.complete_attributes(
            **attributes,
            activation=int(Activation[first.mlp.activation.upper()]),
            alpha=first.mlp.alpha,
            limit=first.mlp.limit,
            epsilon=first.norms[0].epsilon,
        ),
        domain=DOMAIN,
        version=1,
        num_outputs=2,
        name=name,
    )
    insert_behind(graph, first.x, [node])
    y, present = node.outputs
    y.name, last.y.name = last.y.name, f"{last.y.name}/replaced"
    y.type, y.shape = last.y.type, last.y.shape
    last.y.replace_all_uses_with(y, replace_graph_outputs=True)
    present.name = stacked_names(first.number, last.number)[1]
    present.type, present.shape = inputs["past"].type, inputs["past"].shape
    _replace(graph.outputs, _presents(graph, layers), present)
    return node


def _input(node: ir.Node, name: str) -> ir.Value:
    index = [formal.name for formal in OPS[node.op_type].inputs].index(name)
    return operand(node, index)


def _stack_caches(graph: ir.Graph, layers: Sequence[DecoderLayer]) -> ir.Value:
    """The input that takes the place of those of the layers."""
    caches = [value for layer in layers for value in layer.attention.past]
    shape, first = caches[0].shape, layers[0]
    assert shape is not None
    name = stacked_names(first.number, layers[-1].number)[0]
    stack = ir.val(name, shape=ir.Shape([len(layers), 2, *shape]), type=caches[0].type)
    _replace(graph.inputs, caches, stack)
    return stack


def _presents(graph: ir.Graph, layers: Sequence[DecoderLayer]) -> list[ir.Value]:
    # The attention plugins' outputs have taken the names of those that were found.
    names = {f"present.{layer.number}.{part}" for layer in layers for part in ("key", "value")}
    return [value for value in graph.outputs if value.name in names]


def _replace(ports: MutableSequence[ir.Value], old: Sequence[ir.Value], new: ir.Value) -> None:
    at = min(ports.index(value) for value in old)
    for value in old:
        ports.remove(value)
    ports.insert(at, new)


def _norms(graph: ir.Graph, name: str, of: str, norms: Sequence[RMSNorm], layer: DecoderLayer) -> ir.Value:
    rows = torch.stack([norm_weight(norm, layer.mlp.up.weight.shape[1]) for norm in norms])
    assert layer.x.dtype is not None
    value = initializer(f"{name}/{of}_norm_weight", rows, layer.x.dtype)
    register(graph, value)
    return value


def _routers(graph: ir.Graph, name: str, layers: Sequence[DecoderLayer]) -> ir.Value:
    routers = [layer.moe.router.weight for layer in layers if layer.moe is not None]
    rows = torch.stack([torch.cat(list(Matrix([router]).chunks())) for router in routers])
    assert layers[0].x.dtype is not None
    value = initializer(name, rows, layers[0].x.dtype)
    register(graph, value)
    return value


def _stacked(graph: ir.Graph, name: str, values: Sequence[ir.Value]) -> ir.Value:
    """The constants `values` [...] as one [layers, ...]; those that are computed while they are written still are."""
    tensors = [value.const_value for value in values]
    one = tensors[0]
    assert one is not None

    def pieces() -> Iterator[torch.Tensor]:
        for tensor in tensors:
            if isinstance(tensor, StreamedTensor):
                yield from tensor.pieces()
            else:
                assert tensor is not None
                yield as_torch(np.asarray(tensor.numpy()))

    stacked = StreamedTensor(name, one.dtype, (len(tensors), *one.shape.numpy()), pieces)
    value = ir.val(name, const_value=stacked)
    register(graph, value)
    return value
