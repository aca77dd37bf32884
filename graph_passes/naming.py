"""Readable, unique and stable names for subgraphs, from the module paths that exporters leave behind."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import onnx_ir as ir


def subgraph_name(nodes: Sequence[ir.Node], kind: str, taken: set[str]) -> str:
    """The module path that the multiplying `nodes` have in common (or their kind, if none), made unique."""
    paths = [_module_path(node) for node in nodes]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) != 1:
            break
        common.append(parts[0])
    base = re.sub(r"[^\w.]+", "_", ".".join(common)) or kind
    name, count = base, 0
    while name in taken or (name == kind):
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    return name


def _module_path(node: ir.Node) -> list[str]:
    """Dynamo records scopes in metadata, TorchScript in the node's name ("/model/layers.0/mlp/up_proj/MatMul")."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes is not None:
        module = ast.literal_eval(scopes)[-2]
        return module.split(".") if module else []
    path = (node.name or "").split("/")
    return [part for scope in path[1:-1] for part in scope.split(".")] if path[0] == "" else []
