"""Passes with names, and observers of the graph after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

#: Called with a pass's name and the model after it.
Observer: TypeAlias = Callable[[str, ir.Model], None]


@dataclass(frozen=True)
class Pass:
    """A change of a model in place; `name` is a word for files and messages."""

    name: str
    run: Callable[[ir.Model], object]


def on_graph(change: Callable[[ir.Graph], object]) -> Callable[[ir.Model], object]:
    """A change of the main graph as one of a model."""
    return lambda model: change(model.graph)


def run_passes(model: ir.Model, passes: Sequence[Pass], observer: Observer | None = None) -> None:
    """Runs each on `model`."""
    for each in passes:
        each.run(model)
        if observer is not None:
            observer(each.name, model)
