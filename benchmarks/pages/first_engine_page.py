"""Writes docs/figures/first_engine.md: what the first engine of a new user costs, before and after."""

from benchmarks.pages.records import DOCS, link, load
from benchmarks.pages.vla_page import table

PAGE = DOCS / "figures" / "first_engine.md"
BEFORE, NOW = "first_engine_before", "first_engine"
ENGINES = {"demo": "minilm.engine", "demo-llm": "llama.engine"}


def page() -> str:
    before, now = (load(name)["runs"][0] for name in (BEFORE, NOW))
    rows = [("packages", *(f"{run['install']['cpu_s'] / 60:.1f} min" for run in (before, now)))]
    for demo, engine in ENGINES.items():
        for cached, key in (("nothing cached", "empty"), ("once more", "warm")):
            rows.append(
                (f"`make {demo}`, {cached}", *(f"{run[demo][key]['cpu_s'] / 60:.1f} min" for run in (before, now)))
            )
        rows.append(
            (f"its engine, {engine}", *(f"{run[demo]['engines'][engine] / 1e6:.1f} MB" for run in (before, now)))
        )
    heads = ("", f"before ({before['commit'][:8]})", f"now ({now['commit'][:8]})")
    return f"""# The first engine

A fresh clone on a machine of {load(NOW)["environment"]["cores"]} CPU cores without a GPU: CPU time of installing
the packages, of both demos from empty caches, and of both once more; sizes of the engines. Before, all kernels were
compiled and embedded; now those that a plan needs are. Other work ran on the machine, so that elapsed times are not
shown. Written by `python -m benchmarks.pages.first_engine_page` from {link(BEFORE)} and {link(NOW)}, the records of
`python -m benchmarks.models.first_engine REVISION`.

{table(heads, rows)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
