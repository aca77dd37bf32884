"""Finds every MoE block, MLP, linear, attention over a cache and recurrence by structure, not by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel
from trt_nvfp4.graph_passes.patterns.attention.subgraphs import attention_subgraphs
from trt_nvfp4.graph_passes.patterns.by_hand import by_hand_subgraphs
from trt_nvfp4.graph_passes.patterns.decoder_layers import decoder_layers
from trt_nvfp4.graph_passes.patterns.isolation import not_isolated, with_shared_weights
from trt_nvfp4.graph_passes.patterns.joined import join_linears
from trt_nvfp4.graph_passes.patterns.linear import match_linear
from trt_nvfp4.graph_passes.patterns.mlp import match_mlp
from trt_nvfp4.graph_passes.patterns.mlp_chain import chain_blocks
from trt_nvfp4.graph_passes.patterns.moe.block import UnsupportedMoe
from trt_nvfp4.graph_passes.patterns.moe.match import match_moes
from trt_nvfp4.graph_passes.patterns.moe.router import match_routers
from trt_nvfp4.graph_passes.patterns.moe.selected_weights import Selections
from trt_nvfp4.graph_passes.patterns.names import subgraph_name
from trt_nvfp4.graph_passes.patterns.quantized import is_quantized_product
from trt_nvfp4.graph_passes.patterns.recurrent import recurrent_subgraphs
from trt_nvfp4.graph_passes.subgraphs.parts import Block, Linear, Mlp, Moe
from trt_nvfp4.graph_passes.subgraphs.products import GatedMlpSubgraph, LinearSubgraph, MlpSubgraph, MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass(frozen=True)
class _Projections:
    """Linears of one input that become one subgraph."""

    linears: tuple[Linear, ...]


_Part: TypeAlias = Sequence[Block] | _Projections | Moe | UnsupportedMoe
_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def find_subgraphs(model: SourceModel) -> list[Subgraph]:
    """All MoE blocks, MLPs (consecutive blocks merged), remaining linears, attention blocks over caches, recurrences
    and plugin nodes put in by hand of the main graph, and the decoder layers that these make up, in graph order.

    Subgraphs that can be replaced never overlap, but for layers, whose parts are subgraphs too. One that is recognised
    but cannot be replaced carries the reason in `unsupported`; the experts of such an MoE block and the linears of such
    an MLP are looked at one by one. Linears of one input that can be replaced are one subgraph (see `join_linears`).

    Raises:
        ModelError: an MoE block that nothing can compute (see `match_moes`); all linears are quantized already, are in
            float64 or lie in the bodies of control flow.
    """
    position = {node: index for index, node in enumerate(model.graph)}
    linears = {linear.y: linear for linear in map(match_linear, model.graph) if linear is not None}
    selections = Selections(model.graph, linears)
    moes = match_moes(model.ir_model, linears, selections)
    router = "it belongs to a router: rounding its weights could choose other experts"
    recognized = {node for moe in moes if isinstance(moe, Moe) for node in moe.nodes}
    recognized |= {choice.node for moe in moes if isinstance(moe, UnsupportedMoe) for choice in moe.choices}
    choosing = {
        multiply: router if node in recognized else _feeds_a_choice(node)
        for multiply, node in match_routers(model.graph, linears, selections).items()
    }
    choosing |= {moe.router.multiply: router for moe in moes}
    used: set[ir.Node] = {
        linear.multiply
        for moe in moes
        if isinstance(moe, Moe)
        for linear in (*moe.linears, *([moe.shared_gate] if moe.shared_gate else []))
    }
    matched = [
        (mlp, reason or not_isolated(mlp))
        for mlp, reason in filter(None, (match_mlp(down, linears) for down in linears.values()))
    ]
    apart: list[tuple[Mlp, str | None]] = []
    # First those that can be replaced: a linear in front of one is no MLP with its gate or up.
    for mlp, reason in sorted(matched, key=lambda match: match[1] is not None or match[0].down.multiply in choosing):
        if used.isdisjoint(_multiplies(mlp)):
            apart.append((mlp, reason))
            used.update(_multiplies(mlp))
    mlps = with_shared_weights(apart)
    # An MLP that cannot be replaced may be replaced linear by linear, unless a choice depends on it.
    as_linears = {
        multiply: mlp.down.multiply
        for mlp, reason in mlps
        if reason is not None and mlp.down.multiply not in choosing
        for multiply in _multiplies(mlp)
    }
    isolated = with_shared_weights(
        (linear, not_isolated(linear))
        for linear in linears.values()
        if linear.multiply not in used or linear.multiply in as_linears
    )

    free = [part for part, reason in isolated if reason is None and part.multiply not in choosing]
    joined = join_linears(((part, as_linears.get(part.multiply)) for part in free), model.graph, position)

    candidates: list[tuple[_Part, str | None]] = []
    candidates += [(moe, None) for moe in moes]
    apart_from_chains = [reason is not None or mlp.down.multiply in choosing for mlp, reason in mlps]
    chained = [mlp for (mlp, _), is_apart in zip(mlps, apart_from_chains, strict=True) if not is_apart]
    candidates += [(chain, None) for chain in chain_blocks(chained)]
    candidates += [
        ([Block(mlp.x, mlp.y, mlp)], reason)
        for (mlp, reason), is_apart in zip(mlps, apart_from_chains, strict=True)
        if is_apart
    ]
    candidates += [(_Projections(group), None) for group in joined]
    candidates += [
        (_Projections((part,)), reason)
        for part, reason in isolated
        if part not in free and (reason is None or part.multiply not in as_linears)
    ]
    by_hand = list(by_hand_subgraphs(model.graph, position))
    if not candidates and not by_hand:
        _check_anything(model)

    def first_node(candidate: tuple[_Part, str | None]) -> int:
        part = candidate[0]
        if isinstance(part, Moe) and (producer := part.x.producer()) is not None:
            return max(position[part.router.nodes[-1]], position[producer] + 1)  # behind what makes either input
        if isinstance(part, (Moe, UnsupportedMoe)):
            return position[part.router.nodes[-1]]
        return position[part.linears[0].multiply if isinstance(part, _Projections) else part[0].mlp.up.multiply]

    taken = {_name(node) for node in model.graph}  # a plugin node must not take another node's name
    subgraphs: list[Subgraph] = []
    for part, reason in sorted(candidates, key=first_node):
        if isinstance(part, Moe):
            subgraphs.append(_moe_subgraph(part, taken))
        elif isinstance(part, UnsupportedMoe):
            subgraphs.append(_unsupported_moe_subgraph(part, taken))
        elif isinstance(part, _Projections):
            unsupported = _unsupported(reason, choosing.get(part.linears[0].multiply))
            subgraphs.append(_linear_subgraph(part.linears, unsupported, taken, position))
        else:
            unsupported = _unsupported(reason, choosing.get(part[-1].mlp.down.multiply))
            subgraphs.append(_mlp_subgraph(part, unsupported, taken, position))
    places = sorted(map(first_node, candidates))
    attentions = attention_subgraphs(model.ir_model, position, taken)
    recurrent = recurrent_subgraphs(model.graph, position)
    placed = [*zip(places, subgraphs, strict=True), *attentions, *recurrent, *by_hand]
    # A layer stands in front of its parts.
    layers = [*decoder_layers([subgraph for _, subgraph in placed], position, taken)]
    return [subgraph for _, subgraph in sorted([*layers, *placed], key=lambda pair: pair[0])]


def _check_anything(model: SourceModel) -> None:
    """Raises ModelError where products are there, but none that is looked at."""
    for node in model.graph:
        if is_quantized_product(node):
            raise ModelError(
                f"{model.path}: its weights are quantized already, as node '{node.name}' ({node.op_type}) reads them; "
                "give the model as it was before, in float32, float16 or bfloat16"
            )
        if is_op(node, "MatMul", "Gemm") and any(_is_float64(value) for value in node.inputs if value is not None):
            raise ModelError(
                f"{model.path}: its weights are float64, as node '{node.name}' ({node.op_type}) reads them; export the "
                "model in float32, float16 or bfloat16"
            )
    for node in model.graph:
        bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        if any(match_linear(inner) is not None for body in bodies for inner in body.all_nodes()):
            raise ModelError(
                f"{model.path}: its linears lie in the bodies of node '{node.name}' ({node.op_type}), where nothing is "
                "replaced; give each body as a model of its own (of a decoder that optimum merged, decoder_model.onnx "
                "and decoder_with_past_model.onnx)"
            )


def _is_float64(value: ir.Value) -> bool:
    tensor = get_const_tensor(value)
    return tensor is not None and tensor.dtype == ir.DataType.DOUBLE


def _unsupported(not_replaceable: str | None, feeds_a_choice: str | None) -> Reason | None:
    if not_replaceable is not None:
        return Reason(ReasonCode.NOT_REPLACEABLE, not_replaceable)
    return None if feeds_a_choice is None else Reason(ReasonCode.FEEDS_A_CHOICE, feeds_a_choice)


def _feeds_a_choice(chooser: ir.Node) -> str:
    return (
        f"node '{chooser.name}' ({chooser.op_type}) selects weights by its result, as a router does: rounding "
        "could select others (no mixture of experts that NVFP4MoE serves was recognised behind it)"
    )


def _multiplies(mlp: Mlp) -> list[ir.Node]:
    return [linear.multiply for linear in mlp.linears]


def _mlp_subgraph(
    chain: Sequence[Block], unsupported: Reason | None, taken: set[str], position: dict[ir.Node, int]
) -> MlpSubgraph:
    mlp = chain[0].mlp
    of_kind = MlpSubgraph if mlp.gate is None else GatedMlpSubgraph
    nodes = sorted(dict.fromkeys(node for block in chain for node in block.nodes), key=position.__getitem__)
    return of_kind(
        name=subgraph_name([node for block in chain for node in _multiplies(block.mlp)], of_kind.kind, taken),
        nodes=tuple(_name(node) for node in nodes),
        input=chain[0].x.name or "",
        output=chain[-1].y.name or "",
        shapes={
            "in_features": mlp.up.weight.shape[1],
            "intermediate_features": mlp.up.weight.shape[0],
            "out_features": mlp.down.weight.shape[0],
            "layers": len(chain),
        },
        activation=mlp.activation,
        dtype=_DTYPES[mlp.up.weight.dtype],
        unsupported=unsupported,
        blocks=tuple(chain),
    )


def _moe_subgraph(moe: Moe, taken: set[str]) -> MoeSubgraph:
    first = moe.experts[0]
    # With the router: the experts are a module of their own in most models.
    multiplies = [moe.router.multiply, *dict.fromkeys(n for m in moe.experts for n in _multiplies(m))]
    return MoeSubgraph(
        name=subgraph_name(multiplies, MoeSubgraph.kind, taken),
        nodes=tuple(_name(node) for node in moe.nodes),
        input=moe.x.name or "",
        output=moe.y.name or "",
        shapes={
            "in_features": first.up.weight.shape[1],
            "intermediate_features": first.up.weight.shape[0],
            "out_features": first.down.weight.shape[0],
            "experts": len(moe.experts),
            "top_k": moe.routing.top_k,
            "shared_features": 0 if moe.shared is None else moe.shared.up.weight.shape[0],
            "gated": int(first.gate is not None),
        },
        activation=first.activation,
        dtype=_DTYPES[first.up.weight.dtype],
        moe=moe,
    )


def _unsupported_moe_subgraph(moe: UnsupportedMoe, taken: set[str]) -> MoeSubgraph:
    choice = moe.choices[-1]
    return MoeSubgraph(
        name=subgraph_name([moe.router.multiply, choice.node], MoeSubgraph.kind, taken),
        nodes=(_name(choice.node),),
        input=moe.router.x.name or "",
        output=moe.router.y.name or "",
        shapes={
            "in_features": moe.router.weight.shape[1],
            "experts": moe.router.weight.shape[0],
            "top_k": choice.k,
        },
        activation="",
        dtype=_DTYPES[moe.router.weight.dtype],
        unsupported=Reason(ReasonCode.NOT_REPLACEABLE, moe.reason),
        moe=None,
    )


def _linear_subgraph(
    linears: tuple[Linear, ...], unsupported: Reason | None, taken: set[str], position: dict[ir.Node, int]
) -> LinearSubgraph:
    nodes = sorted((node for linear in linears for node in linear.nodes), key=position.__getitem__)
    first = linears[0].weight
    return LinearSubgraph(
        name=subgraph_name([linear.multiply for linear in linears], LinearSubgraph.kind, taken),
        nodes=tuple(_name(node) for node in nodes),
        input=linears[0].x.name or "",
        output=linears[0].y.name or "",
        shapes={
            "in_features": first.shape[1],
            "out_features": sum(linear.weight.shape[0] for linear in linears),
        },
        activation="identity",
        dtype=_DTYPES[first.dtype],
        unsupported=unsupported,
        projections=linears,
    )


def _name(node: ir.Node) -> str:
    assert node.name is not None  # source.load names every node
    return node.name
