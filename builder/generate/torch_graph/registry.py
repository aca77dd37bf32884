"""The registry of standard ONNX operators: a Torch function each, and the inputs that it reads as numbers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Compute = Callable[..., Tensor | tuple[Tensor, ...]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operator:
    """`compute` takes a node's inputs by position (None for one left out) and its attributes by keyword; both are
    checked against its signature before anything runs.

    `host`: inputs that are read as numbers, such as axes and shapes; they come on the CPU. `of_shape`: the result
    depends only on its input's shape, and lies on the CPU. `writes`: inputs that are overwritten by the result.
    """

    compute: Compute
    host: frozenset[int] = frozenset()
    of_shape: bool = False
    writes: tuple[int, ...] = ()

    def unsupported(self, inputs: int, outputs: int, attributes: set[str]) -> str | None:
        """The part of a node's signature that this function does not support, in words; None where it supports all."""
        signature = inspect.signature(self.compute)
        parameters = signature.parameters.values()
        if outputs > 1 and "tuple" not in str(signature.return_annotation):
            return "more than 1 output"
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters) and inputs > len(positional):
            return f"more than {len(positional)} inputs"
        unknown = attributes - {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        return f"attribute {min(unknown)}" if unknown else None


#: By op_type, of ONNX's own domain.
OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, host: tuple[int, ...] = (), of_shape: bool = False, writes: tuple[int, ...] = ()
) -> Callable[[_Function], _Function]:
    """Registers the decorated function as these operators."""

    def register(function: _Function) -> _Function:
        for name in names:
            OPERATORS[name] = Operator(function, frozenset(host), of_shape, writes)
        return function

    return register
