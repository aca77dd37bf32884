"""Shapes of inputs as a command line and the Python API give them."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from trt_nvfp4.builder.errors import UsageError

Shape: TypeAlias = tuple[int, ...]
#: Shapes of inputs by name, for example {"input_ids": (1, 128)}, or `input_ids:1x128`.
Shapes: TypeAlias = str | Mapping[str, Sequence[int]]
#: The largest that TensorRT takes.
LARGEST_DIMENSION = 2**31 - 1


def read_shapes(shapes: Shapes | None, flag: str = "--shapes") -> dict[str, Shape]:
    """`x:1x16,y:2x3` or a mapping as {"x": (1, 16), "y": (2, 3)}; UsageError names the flag."""
    if isinstance(shapes, str):
        return parse_shapes(shapes, flag)
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def parse_shapes(text: str, flag: str) -> dict[str, Shape]:
    """`x:1x16,y:2x3` as {"x": (1, 16), "y": (2, 3)}; UsageError names the flag."""
    shapes: dict[str, Shape] = {}
    for part in filter(None, text.split(",")):
        name, separator, dims = part.rpartition(":")
        if not separator or not re.fullmatch(r"\d+(x\d+)*", dims):
            raise UsageError(f"{flag} {part!r}: expected NAME:AxBxC, such as input_ids:1x128")
        if name in shapes:
            raise UsageError(f"{flag}: gives {name} twice; leave one out")
        for dim in dims.split("x"):
            if len(dim) > 10 or int(dim) > LARGEST_DIMENSION:  # Python reads no number of thousands of digits
                shown = dim if len(dim) <= 40 else f"{dim[:10]}... ({len(dim)} digits)"
                raise UsageError(f"{flag} {name}: no dimension is {shown}; the largest is {LARGEST_DIMENSION}")
        shapes[name] = tuple(int(dim) for dim in dims.split("x"))
    return shapes
