"""Writes docs/figures/mutations.md: what the tests did not notice of kernels broken on purpose, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.records import BENCHMARKS, DOCS

UNEXPLAINED = "Not explained."
PAGE = DOCS / "figures" / "mutations.md"
RECORD = BENCHMARKS / "results" / "emulator" / "mutations.json"

INTRODUCTION = """# Mutations of kernels

`tests/ptx_emulator/mutate.py` breaks one PTX instruction of a kernel at a time and runs the kernel's tests on the
[PTX emulator](../ptx_emulator.md). A mutation survives if every test still passes. This page lists the last run,
[mutations.json](../../benchmarks/results/emulator/mutations.json), with the reason for each survivor but one. What
survived was tried again after tests had been added; what those noticed is no survivor. A reason that speaks of the
tests names what they do not cover. Since the run, fewer mutations are left out by rule: of shuffles, signs, squares and
acquiring loads. Written by `python -m benchmarks.pages.mutations_page`; a test holds it to that.

| kernel | architecture | tried | survived | share |
| --- | --- | ---: | ---: | ---: |
"""


def page() -> str:
    """The page as text, from the record."""
    runs = json.loads(RECORD.read_text())
    return (
        INTRODUCTION + "".join(_line(run) for run in runs) + "".join(part for run in runs for part in _survivors(run))
    )


def _line(run: dict[str, Any]) -> str:
    survived = len(run["survivors"])
    share = 100 * survived / run["tried"]
    return f"| {run['kernels']} | {run['architecture']} | {run['tried']} | {survived} | {share:.1f} % |\n"


def _survivors(run: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {run['kernels']}\n\n| rule | instruction | in its place | why no test can notice, or none does |\n"
    yield "| --- | --- | --- | --- |\n"
    for survivor in run["survivors"]:
        cells = [
            survivor["rule"],
            *(f"`{survivor[key] or 'nothing'}`" for key in ("before", "after")),
            survivor["reason"],
        ]
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
