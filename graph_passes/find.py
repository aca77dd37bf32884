"""Finds every MLP and linear of a model by structure; names play no part in what is found."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trt_nvfp4.graph_passes.block_pattern import chain_blocks
from trt_nvfp4.graph_passes.isolation import isolation_refusal
from trt_nvfp4.graph_passes.linear_pattern import match_linear
from trt_nvfp4.graph_passes.mlp_pattern import match_mlp
from trt_nvfp4.graph_passes.naming import subgraph_name
from trt_nvfp4.graph_passes.source import SourceModel
from trt_nvfp4.graph_passes.subgraph import Block, Linear, Mlp, Subgraph

_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def find_subgraphs(model: SourceModel) -> list[Subgraph]:
    """All MLPs (consecutive blocks merged) and remaining linears of the main graph, in graph order.

    Subgraphs never overlap. One that is recognised but cannot be replaced carries the reason in `refusal`.
    """
    position = {node: index for index, node in enumerate(model.graph)}
    linears = {linear.y: linear for linear in map(match_linear, model.graph) if linear is not None}
    found: list[tuple[Mlp, str | None]] = []
    used: set[ir.Node] = set()
    for down in linears.values():
        match = match_mlp(down, linears)
        if match is None or not used.isdisjoint(_multiplies(match[0])):
            continue
        mlp, refusal = match
        refusal = refusal or isolation_refusal(mlp.nodes, mlp.y, mlp.linears)
        found.append((mlp, refusal))
        used.update(_multiplies(mlp))

    candidates: list[tuple[Sequence[Block] | Linear, str | None]] = []
    candidates += [(chain, None) for chain in chain_blocks([mlp for mlp, refusal in found if refusal is None])]
    candidates += [([Block(mlp.x, mlp.y, mlp)], refusal) for mlp, refusal in found if refusal is not None]
    for linear in linears.values():
        if linear.multiply not in used:
            candidates.append((linear, isolation_refusal(linear.nodes, linear.y, [linear])))

    def first_node(candidate: tuple[Sequence[Block] | Linear, str | None]) -> int:
        part = candidate[0]
        return position[part.multiply if isinstance(part, Linear) else part[0].mlp.up.multiply]

    taken = {_name(node) for node in model.graph}  # a plugin node must not take another node's name
    subgraphs = []
    for part, refusal in sorted(candidates, key=first_node):
        if isinstance(part, Linear):
            subgraphs.append(_linear_subgraph(part, refusal, taken))
        else:
            subgraphs.append(_mlp_subgraph(part, refusal, taken, position))
    return subgraphs


def _multiplies(mlp: Mlp) -> list[ir.Node]:
    return [linear.multiply for linear in mlp.linears]


def _mlp_subgraph(
    chain: Sequence[Block], refusal: str | None, taken: set[str], position: dict[ir.Node, int]
) -> Subgraph:
    mlp = chain[0].mlp
    kind = "mlp" if mlp.gate is None else "gated_mlp"
    nodes = sorted(dict.fromkeys(node for block in chain for node in block.nodes), key=position.__getitem__)
    return Subgraph(
        name=subgraph_name([node for block in chain for node in _multiplies(block.mlp)], kind, taken),
        kind=kind,
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
        refusal=refusal,
        blocks=tuple(chain),
    )


def _linear_subgraph(linear: Linear, refusal: str | None, taken: set[str]) -> Subgraph:
    return Subgraph(
        name=subgraph_name([linear.multiply], "linear", taken),
        kind="linear",
        nodes=tuple(_name(node) for node in linear.nodes),
        input=linear.x.name or "",
        output=linear.y.name or "",
        shapes={"in_features": linear.weight.shape[1], "out_features": linear.weight.shape[0]},
        activation="identity",
        dtype=_DTYPES[linear.weight.dtype],
        refusal=refusal,
        linear=linear,
    )


def _name(node: ir.Node) -> str:
    assert node.name is not None  # source.load names every node
    return node.name
