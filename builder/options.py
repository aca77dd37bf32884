"""An option is written once: a field of an attrs class, with type, default, help, group and where it has no effect.

The command line (`builder.cli.command`), the signatures of the Python API (`accepts`), the reference page
(`builder.cli.reference`) and the checks of values and of what applies read the fields."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin

import attrs

from trt_nvfp4.builder.errors import UsageError

PathLike: TypeAlias = str | Path

_P = ParamSpec("_P")
_R = TypeVar("_R")
_KEY = "option"
#: Help of --trust-remote-code.
RUNS_CODE = "Run Python code that comes in the Hugging Face directory (model, tokenizer). Read it first."


@dataclass(frozen=True)
class Option:
    """An option's properties beside its field's type and default."""

    help: str
    #: The heading of --help that it is under.
    group: str = ""
    metavar: str = ""
    #: Further spellings, such as "-o".
    short: tuple[str, ...] = ()
    #: Where the command line spells it otherwise than the API: without dashes.
    spelling: str = ""
    at_least: int | None = None
    at_most: int | None = None
    #: Values that have another name now.
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: Whether the command line takes it as `--set KEY=VALUE`.
    is_setting: bool = False
    #: Whether it may be given several times.
    repeats: bool = False
    #: What leaves it without effect: names that `Options.given` is called with.
    ignored_with: tuple[str, ...] = ()


def described(help: str, group: str = "", **details: Any) -> dict[str, Option]:
    """The metadata of a field that is an option; `details` are fields of `Option`."""
    return {_KEY: Option(help, group, **details)}


@dataclass(frozen=True)
class Entry:
    """An option with its field."""

    field: attrs.Attribute[Any]
    option: Option

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def spelling(self) -> str:
        """As a command spells it, without dashes."""
        return self.option.spelling or self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """As messages name it."""
        return f"--set {self.spelling}" if self.option.is_setting else f"--{self.spelling}"

    def stated(self, value: object) -> str:
        """The option with a value, as a command takes it."""
        return f"{self.flag}{'=' if self.option.is_setting else ' '}{value}"

    @property
    def is_required(self) -> bool:
        return self.field.default is attrs.NOTHING

    @property
    def is_positional(self) -> bool:
        """Whether a command takes it without a flag."""
        return self.is_required and not self.option.group

    @property
    def default(self) -> Any:
        factory = getattr(self.field.default, "factory", None)
        return self.field.default if factory is None else factory()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; () for other types."""
        return tuple(value for kind in self._types() if get_origin(kind) is Literal for value in get_args(kind))

    def is_a(self, kind: type) -> bool:
        return kind in self._types()

    def _types(self) -> tuple[Any, ...]:
        kind = self.field.type
        return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


@attrs.frozen
class Options:
    """The base of classes of options. Raises UsageError for a value that is not one of a field's."""

    #: The headings of --help, in order.
    GROUPS: ClassVar[tuple[str, ...]] = ()

    def __attrs_post_init__(self) -> None:
        for entry in entries_of(type(self)):
            _check(entry, getattr(self, entry.name))

    @classmethod
    def stated(cls, name: str, value: object) -> str:
        """How messages name an option with a value."""
        return next(entry.stated(value) for entry in entries_of(cls) if entry.name == name)

    def given(self, ignored_with: str) -> list[str]:
        """The flags of options that were given and have no effect with `ignored_with`."""
        return [
            entry.flag
            for entry in entries_of(type(self))
            if ignored_with in entry.option.ignored_with and getattr(self, entry.name) != entry.default
        ]


def entries_of(options: type) -> tuple[Entry, ...]:
    """The options of a class, in the order of its fields."""
    return tuple(Entry(one, one.metadata[_KEY]) for one in attrs.fields(options) if _KEY in one.metadata)


def _check(entry: Entry, value: Any) -> None:
    if entry.choices and value is not None and value not in entry.choices:
        new = entry.option.renamed.get(value) if isinstance(value, str) else None
        why = f"is now called {new}" if new else f"expected {', '.join(entry.choices)}"
        raise UsageError(f"{entry.stated(value)}: {why}")
    if entry.is_a(bool) and not isinstance(value, bool):
        raise UsageError(f"{entry.stated(value)}: expected yes or no")
    low, high = entry.option.at_least, entry.option.at_most
    if value is None or low is None:
        return
    if value < low or (high is not None and value > high):
        expected = f"{low} or more" if high is None else f"{low} to {high}"
        raise UsageError(f"{entry.stated(value)}: expected {expected}")


def accepts(options: Callable[_P, object]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Decorates a function that takes the arguments of the class `options`: type checkers, editors and `help` see
    them."""

    def signed(function: Callable[..., _R]) -> Callable[_P, _R]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(options).replace(return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return signed


def path(value: PathLike | None) -> Path | None:
    return None if value is None else Path(value)


def names(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """`a,b`, or the names one by one."""
    parts = value.split(",") if isinstance(value, str) else value
    return None if parts is None else tuple(part.strip() for part in parts if part.strip())


def numbers(value: str | Sequence[int], flag: str) -> tuple[int, ...]:
    """`1,2`, or the numbers one by one; UsageError names the flag."""
    try:
        return tuple(int(part) for part in (filter(None, value.split(",")) if isinstance(value, str) else value))
    except ValueError:
        raise UsageError(f"{flag} {value}: expected whole numbers such as 1024,4096") from None
