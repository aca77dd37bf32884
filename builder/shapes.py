"""Shape ranges of dynamic inputs: derived from the model, overridden in trtexec's syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import MODEL_AT_FAULT, USAGE, BuilderError

Shape = tuple[int, ...]
# (least, typical, most) of the dimensions that exporters give a meaning by name; the first dimension of an input counts
# as a batch when its name says nothing else.
RANGES = {
    "sequence": (re.compile(r"seq|len|token|time|^s\d*$", re.IGNORECASE), (1, 128, 512)),
    "batch": (re.compile(r"batch|^b$|^n$|^bs", re.IGNORECASE), (1, 1, 8)),
}


@dataclass(frozen=True)
class Profile:
    """Least, typical and most shape of one input."""

    least: Shape
    typical: Shape
    most: Shape


def parse_shapes(text: str, flag: str) -> dict[str, Shape]:
    """`x:1x16,y:2x3` as {"x": (1, 16), "y": (2, 3)}; BuilderError (usage) names the flag."""
    shapes: dict[str, Shape] = {}
    for part in filter(None, text.split(",")):
        name, separator, dims = part.rpartition(":")
        if not separator or not re.fullmatch(r"\d+(x\d+)*", dims):
            raise BuilderError(USAGE, f"{flag} {part!r}: expected NAME:AxBxC, such as input_ids:1x128")
        if name in shapes:
            raise BuilderError(USAGE, f"{flag}: gives {name} twice; leave one out")
        shapes[name] = tuple(int(dim) for dim in dims.split("x"))
    return shapes


def derive_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    least: Mapping[str, Shape] | None = None,
    typical: Mapping[str, Shape] | None = None,
    most: Mapping[str, Shape] | None = None,
    longest: int | None = None,
    flags: tuple[str, ...] = ("--min-shapes", "--opt-shapes", "--max-shapes"),
) -> dict[str, Profile]:
    """A profile for every input that has a dynamic dimension.

    `inputs`: name -> dimensions, a number or the name of a dynamic one ("" or -1 unnamed). An override of one bound
    leaves the others derived, widened so that it fits; in a dimension without defaults, one given bound holds for all
    three. `longest` is the model's longest sequence, where it is known; `flags` are the options that errors name, where
    there is one alone it is that of the typical shapes.

    Raises BuilderError: usage for an override that does not fit or a dimension without a range, model for an input
    that takes no values.
    """
    inputs = {name: ["" if isinstance(dim, int) and dim < 0 else dim for dim in dims] for name, dims in inputs.items()}
    bounds = [dict(least or {}), dict(typical or {}), dict(most or {})]
    for flag, given in zip(flags * (3 // len(flags)), bounds, strict=True):
        for name, shape in given.items():
            _check_override(flag, name, shape, inputs)
    profiles = {}
    for name, dims in inputs.items():
        if 0 in dims:
            raise BuilderError(
                MODEL_AT_FAULT,
                f"input {name!r}: dimension {dims.index(0)} is 0, so that it takes no values; export the model with "
                "the size you need, or with a dynamic one",
            )
        if all(isinstance(dim, int) for dim in dims):
            continue
        overrides = [given.get(name) for given in bounds]
        ranges = [_range_of(name, axis, dim, dims, overrides, longest, flags) for axis, dim in enumerate(dims)]
        low, middle, high = zip(*ranges, strict=True)
        profiles[name] = Profile(low, middle, high)
    return profiles


def _check_override(flag: str, name: str, shape: Shape, inputs: Mapping[str, Sequence[int | str]]) -> None:
    if name not in inputs:
        raise BuilderError(USAGE, f"{flag}: the model has no input {name!r}; it has {', '.join(inputs)}")
    dims = inputs[name]
    fits = len(shape) == len(dims) and all(
        dim == given or not isinstance(dim, int) for dim, given in zip(dims, shape, strict=True)
    )
    if not fits:
        expected = "x".join(str(dim) if isinstance(dim, int) else (dim or "?") for dim in dims)
        raise BuilderError(
            USAGE,
            f"{flag} {name}:{'x'.join(map(str, shape))} does not fit the input's shape {expected or '(a scalar)'}",
        )


def _range_of(
    name: str,
    axis: int,
    dim: int | str,
    dims: Sequence[int | str],
    overrides: Sequence[Shape | None],
    longest: int | None,
    flags: tuple[str, ...],
) -> tuple[int, int, int]:
    if isinstance(dim, int):
        return dim, dim, dim
    given = [None if shape is None else shape[axis] for shape in overrides]
    stated = [value for value in given if value is not None]
    meaning = next(
        (kind for kind, (pattern, _) in RANGES.items() if pattern.search(dim)), "batch" if axis == 0 else None
    )
    default = RANGES[meaning][1] if meaning is not None else None
    if meaning == "sequence" and longest is not None and default is not None:
        default = (default[0], min(default[1], longest), min(default[2], longest))
    if default is None and not stated:
        example = "x".join("1" if not isinstance(d, int) else str(d) for d in dims)
        raise BuilderError(
            USAGE,
            f"input {name!r}: dimension {axis} ({dim or 'unnamed'}) is dynamic and nothing says its range; "
            f"add {', '.join(flags)} {name}:{example} with the sizes you need",
        )
    low, middle, high = default or (min(stated), stated[len(stated) // 2], max(stated))
    low = given[0] if given[0] is not None else min([low, *stated])
    high = given[2] if given[2] is not None else max([high, *stated])
    middle = given[1] if given[1] is not None else min(max(middle, low), high)
    if not 0 < low <= middle <= high:
        raise BuilderError(
            USAGE,
            f"input {name!r}, dimension {axis}: least {low}, typical {middle}, most {high} are out of order; expected "
            f"1 <= least <= typical <= most ({', '.join(flags)})",
        )
    return low, middle, high
