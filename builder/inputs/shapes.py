"""Shape ranges of dynamic inputs: derived from the model, overridden in trtexec's syntax."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.inputs.dimension_names import Expression
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.calibration.samples.samples import CACHE
from trt_nvfp4.plugins.ops.definition import shapes_fit

Range = tuple[int, int, int]
# (min, opt, max) of the dimensions that exporters give a meaning by name; the first dimension of an input counts
# as a batch when its name says nothing else.
RANGES = {
    "sequence": (re.compile(r"seq|len|token|time|^s$", re.IGNORECASE), (1, 128, 512)),
    "samples": (re.compile(r"^samples$"), (1600, 80_000, 480_000)),  # of sound at 16 kHz: 0.1, 5 and 30 s
    "frames": (re.compile(r"^frames$"), (10, 500, 3000)),  # the same at 100 a second
    "batch": (re.compile(r"batch|^b$|^n$|^bs", re.IGNORECASE), (1, 1, 8)),
}
# What torch's exporter calls a dimension that nobody named: only its place gives it a meaning.
_NUMBERED = re.compile(r"s\d+")
# What no sum of names has.
_ARITHMETIC = re.compile(r"[*/()]|-\s*\w")
# Within names of lengths of a decoder's cache, and of the cache with the new tokens.
_PAST = re.compile(r"past_?", re.IGNORECASE)
_TOTAL = re.compile(r"total_?|kv_?", re.IGNORECASE)


@dataclass(frozen=True)
class Profile:
    """Min, opt and max shape of one input; its values, where these are the shape of something."""

    min: Shape
    opt: Shape
    max: Shape
    is_values: bool = False


#: A profile's shapes of every input with a dynamic dimension.
Profiles: TypeAlias = dict[str, Profile]


def opt_shapes_of(profiles: Mapping[str, Profile]) -> dict[str, Shape]:
    """The shapes that an engine is tuned for."""
    return {name: profile.opt for name, profile in profiles.items() if not profile.is_values}


def derive_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    min_shapes: Mapping[str, Shape] | None = None,
    opt_shapes: Mapping[str, Shape] | None = None,
    max_shapes: Mapping[str, Shape] | None = None,
    longest: int | None = None,
    flags: tuple[str, ...] = ("--min-shapes", "--opt-shapes", "--max-shapes"),
    batch: Range | None = None,
) -> dict[str, Profile]:
    """A profile for every input that has a dynamic dimension.

    `inputs`: name -> dimensions, a number or the name of a dynamic one ("" or -1 unnamed). An override of one bound
    leaves the others derived, widened so that it fits; in a dimension without defaults, one given bound holds for all
    three; it holds for other inputs' dimensions of the same name, too. A dimension that is the sum of others by its
    name, as a decoder's cached and new tokens, takes the sums of their ranges; `2*batch` takes twice that of `batch`.
    The min override of a cache may be 0.
    `longest` is the model's longest sequence, where it is known, and `batch` the range of batches that nothing else is
    said of; `flags` are the options that errors name, a single one is that of the opt shapes.

    Raises BuilderError: usage for an override that does not fit or a dimension without a range, model for an input
    that takes no values.
    """
    inputs = {name: ["" if isinstance(dim, int) and dim < 0 else dim for dim in dims] for name, dims in inputs.items()}
    bounds = [dict(min_shapes or {}), dict(opt_shapes or {}), dict(max_shapes or {})]
    for flag, given in zip(flags * (3 // len(flags)), bounds, strict=True):
        for name, shape in given.items():
            _check_override(flag, name, shape, inputs)
        _check_equal_names(flag, given, inputs)
    ranges = _Ranges(inputs, bounds, longest, flags, batch)
    profiles = {}
    for name, dims in inputs.items():
        if 0 in dims:
            raise ModelFaultError(
                f"input {name!r}: dimension {dims.index(0)} is 0, so that it takes no values; export the model with "
                "the size you need, or with a dynamic one"
            )
        if all(isinstance(dim, int) for dim in dims):
            continue
        low, middle, high = zip(*(ranges.of(name, axis) for axis in range(len(dims))), strict=True)
        profiles[name] = Profile(low, middle, high)
    return profiles


def derive_opt_shapes(
    inputs: Mapping[str, Sequence[int | str]], given: Mapping[str, Shape] | None = None
) -> dict[str, Shape]:
    """The opt shape of every input, derived, or that of --shapes, `given`; raises as `derive_profiles`."""
    profiles = derive_profiles(inputs, opt_shapes=given, flags=("--shapes",))
    return {
        name: profiles[name].opt if name in profiles else tuple(int(dim) for dim in dims)
        for name, dims in inputs.items()
    }


def _check_override(flag: str, name: str, shape: Shape, inputs: Mapping[str, Sequence[int | str]]) -> None:
    if name not in inputs:
        raise UsageError(f"{flag}: the model has no input {name!r}; it has {', '.join(inputs)}")
    dims = inputs[name]
    if not shapes_fit(shape, dims):
        expected = ", ".join(str(dim) if isinstance(dim, int) else (dim or "?") for dim in dims)
        raise UsageError(f"{flag} {name}:{'x'.join(map(str, shape))} does not fit the input's shape [{expected}]")


def _check_equal_names(flag: str, given: Mapping[str, Shape], inputs: Mapping[str, Sequence[int | str]]) -> None:
    """Raise UsageError where one option gives dimensions of one name several sizes: TensorRT wants them
    equal."""
    seen: dict[str, tuple[str, int]] = {}
    for name, shape in given.items():
        for dim, size in zip(inputs[name], shape, strict=True):
            if not isinstance(dim, str) or not dim:
                continue
            other, expected = seen.setdefault(dim, (name, size))
            if size != expected:
                raise UsageError(
                    f"{flag}: dimension {dim} is {expected} in {other} and {size} in {name}; give it one size"
                )


@dataclass(frozen=True)
class _Ranges:
    """The range of every dimension, from what `derive_profiles` takes; `bounds` are the three kinds of overrides."""

    inputs: Mapping[str, Sequence[int | str]]
    bounds: Sequence[Mapping[str, Shape]]
    longest: int | None
    flags: tuple[str, ...]
    batch: Range | None = None

    def of(self, name: str, axis: int) -> Range:
        dim = self.inputs[name][axis]
        if isinstance(dim, int):
            return dim, dim, dim
        same = [(name, axis), *self._places(dim)]
        given = [next((shapes[n][a] for n, a in same if n in shapes), None) for shapes in self.bounds]
        stated = [value for value in given if value is not None]
        computed = self._computed(dim)
        terms = None if computed is not None else self._terms(dim)
        default = computed or (self._default(dim, axis) if terms is None else self._sum(terms))
        if default is None and not stated:
            why = "nothing says its range" if terms is None else f"not all of {' and '.join(terms)} are in the inputs"
            example = "x".join("1" if not isinstance(d, int) else str(d) for d in self.inputs[name])
            raise UsageError(
                f"input {name!r}: dimension {axis} ({dim or 'unnamed'}) is dynamic and {why}; "
                f"add {', '.join(self.flags)} {name}:{example} with the sizes you need"
            )
        if computed is not None:
            self._check_computed(name, axis, given, computed, dim, sorted(Expression(dim).names))
        elif terms is not None and default is not None:
            parts = [term for term in terms if not term.isdecimal()]
            self._check_computed(name, axis, given, default, " + ".join(terms), parts)
        low, middle, high = default or (min(stated), stated[len(stated) // 2], max(stated))
        low = given[0] if given[0] is not None else min([low, *stated])
        high = given[2] if given[2] is not None else max([high, *stated])
        middle = given[1] if given[1] is not None else min(max(middle, low), high)
        # A cache may be empty, but the opt one, which an engine is tuned for, only at the --shapes of a single run.
        single = len(self.flags) == 1
        may_be_empty = CACHE.search(name) is not None and given[1 if single else 0] == 0
        if not (0 if may_be_empty else 1) <= low <= middle <= high or not (middle or single):
            expected = f"1 <= min <= opt <= max{', or a min of 0' if CACHE.search(name) else ''}"
            raise UsageError(
                f"input {name!r}, dimension {axis} ({dim or 'unnamed'}): min {low}, opt {middle}, max {high} "
                f"are out of order; expected {expected} ({', '.join(self.flags)})"
            )
        if self.longest is not None and high > self.longest and self._meaning(dim, axis) == "sequence":
            raise UsageError(
                f"{self.flags[-1]} {name}: dimension {axis} ({dim}) has {high} tokens, and the model's configuration "
                f"allows for {self.longest}"
            )
        return low, middle, high

    def _places(self, dim: str) -> list[tuple[str, int]]:
        """Where inputs have the named dimension."""
        return [(name, dims.index(dim)) for name, dims in self.inputs.items() if dim and dim in dims]

    def _computed(self, dim: str) -> Range | None:
        """The range of a dimension whose name says how others give it, such as `2*batch`; None for other names.

        Plain sums are those of `_terms`."""
        if not _ARITHMETIC.search(dim):
            return None
        try:
            expression = Expression(dim)
            ranges = {name: self._named(name) for name in expression.names}
            known = {name: range_ for name, range_ in ranges.items() if range_ is not None}
            if known.keys() < ranges.keys():
                return None
            low, middle, high = sorted(
                expression.value({name: range_[bound] for name, range_ in known.items()}) for bound in range(3)
            )
        except ValueError:
            return None
        return low, middle, high

    def _named(self, dim: str) -> Range | None:
        """The range of a dimension that others are computed from: that of the inputs, or what its name says."""
        places = self._places(dim)
        return self.of(*places[0]) if places else self._default(dim, axis=-1)

    def _check_computed(
        self, name: str, axis: int, given: Sequence[int | None], computed: Range, formula: str, names: Sequence[str]
    ) -> None:
        """Raise UsageError where a given size is not what `formula` of the dimensions `names` gives: a mask
        spans past and new tokens."""
        if not all(map(self._places, names)):
            return
        for flag, stated, expected in zip(self.flags * (3 // len(self.flags)), given, computed, strict=True):
            if stated not in (None, expected):
                inputs = sorted({place for part in names for place, _ in self._places(part)})
                raise UsageError(
                    f"{flag} {name}: dimension {axis} is {formula}, which is {expected} here and not {stated}; "
                    f"give the shapes of {', '.join(inputs)} too, so that they agree"
                )

    def _meaning(self, dim: str, axis: int) -> str | None:
        """The key in `RANGES` of a dimension."""
        named = next((kind for kind, (pattern, _) in RANGES.items() if pattern.search(dim)), None)
        return named or ("batch" if axis == 0 else self._numbered(dim))

    def _default(self, dim: str, axis: int) -> Range | None:
        meaning = self._meaning(dim, axis)
        if meaning is None:
            return None
        low, middle, high = self.batch if meaning == "batch" and self.batch else RANGES[meaning][1]
        if meaning == "sequence" and self.longest is not None:
            return low, min(middle, self.longest), min(high, self.longest)
        return low, middle, high

    def _numbered(self, dim: str) -> str | None:
        """The key in `RANGES` of a dimension that torch numbered: the first of an input is a batch, the second of few a
        sequence."""
        places = self._places(dim) if _NUMBERED.fullmatch(dim) else []
        if any(axis == 0 for _, axis in places):
            return "batch"
        return "sequence" if any(axis == 1 and len(self.inputs[name]) <= 3 for name, axis in places) else None

    def _terms(self, dim: str) -> list[str] | None:
        """The dimensions whose sum a dimension is by its name; None for others, and for totals without a cache."""
        if "+" in dim:
            terms = [term.strip() for term in dim.split("+")]
            # Optimum writes "past_sequence_length + 1" where "sequence_length" is dynamic, too.
            new = [_PAST.sub("", term) for term in terms if _PAST.match(term)]
            return [new[0] if term == "1" and new and self._places(new[0]) else term for term in terms]
        names = {part for dims in self.inputs.values() for part in dims if isinstance(part, str) and part}
        cached = any(CACHE.search(part) for part in (*self.inputs, *names))
        of_the_cache = any(CACHE.search(name) for name, _ in self._places(dim))
        if not cached or of_the_cache or not _TOTAL.match(dim):
            return None
        terms = [_TOTAL.sub("past_", dim, count=1), _TOTAL.sub("", dim, count=1)]
        if names.issuperset(terms):
            return terms
        # Under other names, where there is only one of each.
        past = [part for part in names if _PAST.match(part) and "+" not in part]
        sequence = RANGES["sequence"][0]
        new = [part for part in names if (sequence.search(part) or _NUMBERED.fullmatch(part)) and not _PAST.match(part)]
        new = [part for part in new if not _TOTAL.match(part) and "+" not in part]
        return [*past, *new] if len(past) == len(new) == 1 else terms

    def _sum(self, terms: Sequence[str]) -> Range | None:
        """The sum of the ranges of numbers and of dimensions; None where an input has no such dimension."""
        ranges = []
        for term in terms:
            if term.isdecimal():
                ranges.append((int(term),) * 3)
            elif places := self._places(term):
                ranges.append(self.of(*places[0]))
            elif computed := self._computed(term):
                ranges.append(computed)
            else:
                return None
        low, middle, high = map(sum, zip(*ranges, strict=True))
        return low, middle, high
