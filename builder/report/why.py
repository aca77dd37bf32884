"""Why a node of a model is in no subgraph, or a subgraph cannot be replaced: `inspect-engine MODEL --why NAME`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.patterns.give_ups import GiveUp, noting


@dataclass(frozen=True)
class Found:
    """A subgraph with the node in it, or of the name: `why` it cannot be replaced ("" where `op` can replace it)."""

    name: str
    kind: str
    op: str
    why: str


@dataclass(frozen=True)
class Why:
    """What is known of a node or subgraph: the subgraphs that it is in, and the matchers that gave up on it."""

    name: str
    subgraphs: tuple[Found, ...]
    gave_up: tuple[GiveUp, ...]


def explain(model: Path, name: str) -> Why:
    """What the matchers say of the node, subgraph or tensor `name` of the ONNX file `model`.

    Raises BuilderError (usage) where the model, as it is when subgraphs are looked for, has nothing of that name; and
    ModelError for a model that is none.
    """
    if model.suffix != ".onnx":
        raise BuilderError(USAGE, f"{model}: --why looks into an ONNX file")
    source = load(model)
    with noting() as noted:
        subgraphs = find_subgraphs(source)
    nodes = {node.name or "": node for node in source.graph}
    producer = next((node.name or "" for node in source.graph if name in {v.name for v in node.outputs}), name)
    if name not in nodes and name not in {subgraph.name for subgraph in subgraphs} and producer == name:
        near = difflib.get_close_matches(name, [*nodes, *(subgraph.name for subgraph in subgraphs)], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise BuilderError(
            USAGE,
            f"{model}: no node, subgraph or tensor is called '{name}' where subgraphs are looked for{hint}; what is "
            "constant is folded before (build-engine --dump-passes DIR shows the graph after each pass)",
        )
    here = [each for each in subgraphs if each.name == name or producer in each.nodes]
    members = {producer} | {node for each in here if each.name == name for node in each.nodes}
    return Why(
        name,
        tuple(Found(each.name, each.kind, each.op, each.refusal or each.caution or "") for each in here),
        tuple(each for each in noted if each.node in members or f"'{producer}'" in each.why),
    )


def tables(found: Why) -> list[Table]:
    """For the terminal."""
    inside = Table("subgraph", "kind", "what becomes of it", title=f"'{found.name}' is in", title_justify="left")
    for each in found.subgraphs:
        inside.add_row(each.name, each.kind, f"stays: {each.why}" if each.why else f"{each.op} can replace it")
    if not found.subgraphs:
        inside.add_row("none", "", "it stays as it is")
    given = Table("matcher", "at node", "gave up because", title="Matchers that gave up", title_justify="left")
    for noted in found.gave_up:
        given.add_row(noted.matcher, noted.node, noted.why)
    return [inside, given] if found.gave_up else [inside]
