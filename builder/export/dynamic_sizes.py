"""Sizes that stay dynamic where modeling code asks Python for them.

`len(tensor)` and `int(size)` are numbers of Python, at which torch.export fixes a dynamic size.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _KindOfInteger(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        is_size = arguments and isinstance(arguments[0], torch.SymInt)
        return arguments[0] if is_size else builtins.int(*arguments, **named)


class _Integer(metaclass=_KindOfInteger):
    """`int` that leaves dynamic sizes as they are."""


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) else builtins.len(value)


@contextmanager
def dynamic_sizes(module: torch.nn.Module) -> Iterator[None]:
    """Within, `len` and `int` keep sizes dynamic in the files that define the module's classes in diffusers."""
    replaced = {"len": _length, "int": _Integer}
    defining = {type(part).__module__ for part in module.modules()}
    files = [vars(sys.modules[name]) for name in defining if name.startswith("diffusers.")]
    for names in files:
        names.update(replaced)
    try:
        yield
    finally:
        for names in files:
            for name in replaced:
                del names[name]
