"""Writes docs/figures/mutations.md: what the tests did not notice of kernels broken on purpose, and why."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.pages.records import BENCHMARKS, DOCS

PAGE = DOCS / "figures" / "mutations.md"
RECORD = BENCHMARKS / "results" / "emulator" / "mutations.json"

INTRODUCTION = """# Mutations of kernels

One PTX instruction of a kernel was broken at a time, and the kernel's tests ran on the
[PTX emulator](../ptx_emulator.md#mutations). A mutation survives if every test still passes. The record is
[mutations.json](../../benchmarks/results/emulator/mutations.json); the pytest plugin that made it is
`tests/ptx_emulator/mutate.py` of commit 94ba3836. Written by `python -m benchmarks.pages.mutations_page`; a test checks
it.

Mutations were drawn at random from instructions that some test executes, without those that a rule leaves out.
[Below](#tests) are the tests that tried them. A survivor is equivalent if no test could notice it: outputs are the
same, or as near as float32 rounds. All, executed and drawn from of the W4A16 persistent MLP are those of an earlier
run, of all its ten instantiations. `NEAREST` of `test_emulated_rounding.py` was 5e-7 as mutations were tried, and 1e-6
to 2e-6 in the first drafts; today's 8e-7 may miss what changes hidden values by less.

| kernel | GPU | all | executed | drawn from | tried | survived | share | equivalent | not noticed |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""

TESTS = """
## Tests

Tests were written meanwhile (drafts of a commit): what one draft noticed was not tried again, what survived was tried
again by the tests that had been added.

| kernel | mutations | tests of commit | files in tests/plugins | `-k` | without `test_...` |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page as text, from the record."""
    runs = json.loads(RECORD.read_text())
    parts = [INTRODUCTION, *map(_line, runs)]
    for run in runs:
        parts += _survivors(run)
    parts.append(TESTS)
    for run in runs:
        parts += map(partial(_tests, run["kernels"]), run["tests"])
    return "".join(parts)


def _line(run: dict[str, Any]) -> str:
    survived, equivalent = len(run["survivors"]), sum(survivor["equivalent"] for survivor in run["survivors"])
    cells = [run["kernels"], run["architecture"], *(f"{run[key]:,}" for key in ("in_all", "executed", "drawn_from"))]
    cells += [str(run["tried"]), str(survived), f"{100 * survived / run['tried']:.1f} %"]
    return f"| {' | '.join([*cells, str(equivalent), str(survived - equivalent)])} |\n"


def _survivors(run: dict[str, Any]) -> Iterator[str]:
    if not run["survivors"]:
        return
    yield f"\n## {run['kernels']}\n\n| rule | instruction | in its place | equivalent | why |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    for survivor in run["survivors"]:
        cells = [
            survivor["rule"],
            *(f"`{survivor[key] or 'nothing'}`" for key in ("before", "after")),
            "yes" if survivor["equivalent"] else "no",
            survivor["reason"],
        ]
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _tests(kernels: str, run: dict[str, Any]) -> str:
    files, without = (", ".join(f"`{name}`" for name in run.get(key, ())) for key in ("files", "deselect"))
    cells = [kernels, run["mutations"], run["commit"], files, f"`{run['select']}`", without]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
