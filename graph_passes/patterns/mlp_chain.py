"""Chains consecutive MLP blocks, [RMSNorm] -> MLP -> [residual add], that one persistent launch can compute."""

from collections.abc import Sequence

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.patterns.isolation import escaping_use
from trt_nvfp4.graph_passes.patterns.rms_norm import match_rms_norm
from trt_nvfp4.graph_passes.subgraphs.parts import Block, Mlp


def _signature(block: Block) -> tuple[object, ...]:
    """The properties that all layers of one persistent op share."""
    mlp = block.mlp
    return (
        mlp.gate is None,
        mlp.activation,
        mlp.alpha,
        mlp.limit,
        mlp.up.weight.dtype,
        mlp.up.weight.shape,
        mlp.down.weight.shape,
        None if block.norm is None else block.norm.epsilon,
        block.add is None,
    )


def chain_blocks(mlps: Sequence[Mlp]) -> list[list[Block]]:
    """Groups `mlps` (in graph order) into maximal chains; an MLP without neighbours is a chain of one bare MLP."""
    by_input: dict[ir.Value, list[Block]] = {}
    blocks = [_blocks_of(mlp) for mlp in mlps]
    for variants in blocks:
        for block in variants:
            by_input.setdefault(block.x, []).append(block)
    chains: list[list[Block]] = []
    taken: set[int] = set()
    for variants in blocks:
        if id(variants[0].mlp) in taken:
            continue
        chain = max((_chain_from(block, by_input) for block in variants), key=len)
        if len(chain) == 1:
            chain = [Block(chain[0].mlp.x, chain[0].mlp.y, chain[0].mlp)]
        taken.update(id(block.mlp) for block in chain)
        chains.append(chain)
    return chains


def _chain_from(block: Block, by_input: dict[ir.Value, list[Block]]) -> list[Block]:
    chain = [block]
    while True:
        last = chain[-1]
        following = [b for b in by_input.get(last.y, ()) if _signature(b) == _signature(last)]
        if not following or last.mlp.up.weight.shape[1] != last.mlp.down.weight.shape[0]:
            return chain
        if last.mlp.flattens or following[0].mlp.flattens:
            return chain  # each layer of a persistent op keeps the leading dimensions
        if escaping_use([last.y], {*last.nodes, *following[0].nodes}) is not None:
            return chain
        if any(block.mlp.up.weight == following[0].mlp.up.weight for block in chain):
            return chain  # a persistent op stacks its layers' weights: it would hold these twice
        chain.append(following[0])


def _blocks_of(mlp: Mlp) -> list[Block]:
    """The block readings of an MLP, the widest first."""
    features = mlp.up.weight.shape[1]
    norm = match_rms_norm(mlp.x, features)
    if norm is not None:
        computed = [value for node in norm.nodes for value in node.outputs]
        if norm.x.dtype != mlp.x.dtype or escaping_use(computed, {*norm.nodes, *mlp.nodes}) is not None:
            norm = None
    readings = []
    for candidate in (norm, None) if norm is not None else (None,):
        x = mlp.x if candidate is None else candidate.x
        uses = mlp.y.uses()
        add = next(iter(uses)).node if len(uses) == 1 and not mlp.y.is_graph_output() else None
        if is_op(add, "Add") and any(operand is x for operand in add.inputs):
            readings.append(Block(x, add.outputs[0], mlp, candidate, add))
        readings.append(Block(x, mlp.y, mlp, candidate, None))
    return readings
