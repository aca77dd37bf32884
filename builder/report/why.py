"""Why a node of a model is in no subgraph, or a subgraph cannot be replaced: `inspect-engine MODEL --why NAME`."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.model.onnx_file import is_rewritten, opened
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.patterns.give_ups import GiveUp, noting
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


@dataclass(frozen=True)
class Found:
    """A subgraph with the node in it, or of the name: `why` it cannot be replaced ("" where `op` can replace it)."""

    name: str
    kind: str
    op: str
    why: str


@dataclass(frozen=True)
class Why:
    """The subgraphs that a node or subgraph is in, and the matchers that gave up on it."""

    name: str
    subgraphs: tuple[Found, ...]
    gave_up: tuple[GiveUp, ...]


def explain(model: Path, name: str) -> Why:
    """Explains the node, subgraph or tensor `name` of the ONNX file `model` by the matchers.

    Raises UsageError for a rewritten model, and where the model, as it is when subgraphs are looked for, has nothing of
    that name; ModelFaultError or ModelError for an invalid model.
    """
    if model.suffix != ".onnx":
        raise UsageError(f"{model}: --why looks into an ONNX file")
    file = opened(model)
    if is_rewritten(file.proto):
        raise UsageError(
            f"{model}: has been rewritten already; --why explains the original, so give that (OUT.report.json says "
            "what became of each subgraph)"
        )
    source = load(file)
    with noting() as noted:
        subgraphs = find_subgraphs(source)
    nodes = {node.name or "": node for node in source.graph}
    producer = next((node.name or "" for node in source.graph if name in {v.name for v in node.outputs}), name)
    if name not in nodes and name not in {subgraph.name for subgraph in subgraphs} and producer == name:
        near = difflib.get_close_matches(name, [*nodes, *(subgraph.name for subgraph in subgraphs)], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"{model}: no node, subgraph or tensor is called '{name}' where subgraphs are looked for{hint}; what is "
            "constant is folded before (build-engine --set dump-passes=DIR shows the graph after each pass)"
        )
    here = [each for each in subgraphs if each.name == name or producer in each.nodes]
    members = {producer} | {node for each in here if each.name == name for node in each.nodes}
    return Why(
        name,
        tuple(_found(each) for each in here),
        tuple(each for each in noted if each.node in members or f"'{producer}'" in each.why),
    )


def _found(subgraph: Subgraph) -> Found:
    why = "" if subgraph.unsupported is None else subgraph.unsupported.text
    return Found(subgraph.name, subgraph.kind, subgraph.op, why)


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
