"""Tables for the terminal: no wider than 80 columns where what they hold allows for it, equal layers in one row."""

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

_NUMBER = re.compile(r"\d+")
# What reasons name: tensors, nodes, files.
_NAMED = re.compile(r"'[^']*'")


def grid(title: str, headings: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table; the headings that are among `numbers` stand on the right. Long cells are folded."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    return table


def equal_rows(rows: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, list[str], int]]:
    """(name, cells) pairs whose names differ only in numbers and whose cells are equal, as (name, cells, how many), in
    order of appearance: layers.0.mlp and layers.1.mlp are layers.{0-1}.mlp."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, cells in rows:
        groups.setdefault((_NUMBER.sub("#", name), tuple(cells)), []).append(name)
    return [(joined_name(names), list(shown), len(names)) for (_, shown), names in groups.items()]


def joined_name(names: Sequence[str]) -> str:
    """One name for names that differ only in numbers: a.0.b, a.1.b, a.3.b are a.{0-1,3}.b."""
    numbers = [_NUMBER.findall(name) for name in names]
    columns = iter([_column(set(column)) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda found: next(columns, found[0]), names[0])


def _column(spellings: set[str]) -> str:
    """As it is spelt where it is one, leading zeros included."""
    if len(spellings) == 1:
        return next(iter(spellings))
    return f"{{{_ranges(sorted({int(number) for number in spellings}))}}}"


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def brief_names(names: Sequence[str]) -> str:
    """The first of some names, with those that differ from it only in numbers, and how many more there are."""
    (first, _, count), *_ = equal_rows((name, ()) for name in names)
    return f"{first} and {len(names) - count} more" if len(names) > count else first


def equal_reasons(reasons: Iterable[tuple[str, str, str]]) -> list[tuple[list[str], str, str]]:
    """(name, what, reason) whose reasons differ only in what they name, as (the names, what, the first reason)."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, what, reason in reasons:
        groups.setdefault((what, _NAMED.sub("''", reason)), []).append((name, reason))
    return [
        (
            [name for name, _ in found],
            what,
            found[0][1] + (f" (and {others - 1} alike)" if (others := len({why for _, why in found})) > 1 else ""),
        )
        for (what, _), found in groups.items()
    ]
