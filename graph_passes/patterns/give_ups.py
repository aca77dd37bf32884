"""Why matchers gave up on nodes: noted while somebody asks, for `inspect-engine --why`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class GiveUp:
    """A `matcher` looked at `node`, by name, and gave up because of `why`."""

    matcher: str
    node: str
    why: str


_noted: ContextVar[list[GiveUp] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[GiveUp]]:
    """Collects what matchers give up on inside the block, each once, in the order of their looks."""
    found: list[GiveUp] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def gave_up(matcher: str, node: ir.Node | None, why: str) -> None:
    """Notes it, where somebody asks."""
    found = _noted.get()
    noted = GiveUp(matcher, "" if node is None else node.name or "", why)
    if found is not None and noted not in found:
        found.append(noted)


def described(value: ir.Value) -> str:
    """A tensor, and what it comes from."""
    producer = value.producer()
    if producer is not None:
        return f"'{value.name}' of node '{producer.name}' ({producer.op_type})"
    kind = "input of the graph" if value.is_graph_input() else "constant"
    return f"'{value.name}', {'an' if kind[0] == 'i' else 'a'} {kind}"
