"""Writes docs/figures/mutations.md: what the tests did not notice of kernels broken on purpose, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.records import BENCHMARKS, DOCS

PAGE = DOCS / "figures" / "mutations.md"
RECORD = BENCHMARKS / "results" / "emulator" / "mutations.json"

INTRODUCTION = """# Mutations of kernels

`tests/ptx_emulator/mutate.py` breaks one PTX instruction of a kernel at a time and runs the kernel's tests on the
[PTX emulator](../ptx_emulator.md#mutations). A mutation survives if every test still passes. The record is
[mutations.json](../../benchmarks/results/emulator/mutations.json). Written by
`python -m benchmarks.pages.mutations_page`; a test holds it to that.

The first run drew by earlier rules. What survived was tried again after tests had been added; what those noticed is no
survivor. The second draws by today's rules, from instructions that some test executes, among them those behind guards
and ways that are taken; its time ended before it had tried 200 of each.

| kernel | GPU | first: tried | survived | share | all | executed | drawn from | second: tried | survived | share |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def page() -> str:
    """The page as text, from the record."""
    runs = json.loads(RECORD.read_text())
    parts = [INTRODUCTION, *map(_line, runs)]
    for run in runs:
        parts += _survivors(f"{run['kernels']}, first run", run["survivors"])
        parts += _survivors(f"{run['kernels']}, second run", run["later"]["survivors"])
    return "".join(parts)


def _line(run: dict[str, Any]) -> str:
    later = run["later"]
    cells = [run["kernels"], run["architecture"], *_shares(run["tried"], len(run["survivors"]))]
    cells += [f"{later[key]:,}" for key in ("in_all", "executed", "drawn_from")]
    return f"| {' | '.join(cells + _shares(later['tried'], len(later['survivors'])))} |\n"


def _shares(tried: int, survived: int) -> list[str]:
    return [str(tried), str(survived), f"{100 * survived / tried:.1f} %"]


def _survivors(heading: str, survivors: list[dict[str, Any]]) -> Iterator[str]:
    yield f"\n## {heading}\n\n| rule | instruction | in its place | why no test can notice, or none does |\n"
    yield "| --- | --- | --- | --- |\n"
    for survivor in survivors:
        cells = [
            survivor["rule"],
            *(f"`{survivor[key] or 'nothing'}`" for key in ("before", "after")),
            survivor["reason"],
        ]
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
