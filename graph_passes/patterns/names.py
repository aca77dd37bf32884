"""Readable, unique and stable names for subgraphs, from the module paths that exporters leave behind."""

import re
from collections.abc import Sequence

import onnx_ir as ir


def subgraph_name(nodes: Sequence[ir.Node], kind: str, taken: set[str], part: str = "") -> str:
    """The module path that the multiplying `nodes` have in common (or their kind, if none), made unique; with `part`, a
    part of that module."""
    paths = [module_path(node) for node in nodes]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) != 1:
            break
        common.append(parts[0])
    common += [part] if part else []
    base = re.sub(r"[^\w.]+", "_", ".".join(common)) or kind
    name, count = base, 0
    while name in taken or (name == kind):
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    return name


def module_path(node: ir.Node) -> list[str]:
    """The names of the modules that the node is in, outermost first; empty where the exporter recorded none.

    Dynamo records scopes in metadata, TorchScript in the node's name ("/model/layers.0/mlp/up_proj/MatMul").
    """
    module = _recorded_module(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
    if module is not None:
        return module.split(".") if module else []
    path = (node.name or "").split("/")
    return [part for scope in path[1:-1] for part in scope.split(".")] if path[0] == "" else []


def _recorded_module(scopes: str) -> str | None:
    """The innermost module of a list like "['', 'model', 'model.mlp', 'linear_3']", or None for another text."""
    names = re.findall("'([^']*)'", scopes)
    written = ", ".join(f"'{name}'" for name in names)
    return names[-2] if scopes == f"[{written}]" and len(names) > 1 else None
