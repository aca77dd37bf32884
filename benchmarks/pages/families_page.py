"""Writes docs/figures/families.md from the records of tests/builder/class_sweep.py and
tests/builder/export/family_sweep.py."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.records import DOCS, link, load
from benchmarks.pages.vla_page import table

PAGE = DOCS / "figures" / "families.md"
NAME, CLASSES = "families", "classes"
_SHOWN = 220
_ADVICE = (
    "; give a Python file with its parts (model.py:components)",
    "; export it with torch.onnx.export and give the ONNX file",
    ": one of its parts does not run on only its inputs, or its features are counted in another way",
)


def page() -> str:
    return f"""# Models by class

{built()}

## Language models, token by token

{generated()}
"""


def built() -> str:
    """Which classes became engines."""
    record = load(CLASSES)
    outcomes = record["outcomes"]
    rows = [(f"`{name}`", entry["how"], shown(entry["said"], name)) for name, entry in sorted(outcomes.items())]
    return f"""{len(outcomes)} classes of transformers' automatic mappings, tiny and with random weights, each built for
`rtx-blackwell` and verified. *built*, with the options that a message asked for; *refused*: one message; *too long*:
over the limit of the run, beside other work; *not made*: no tiny configuration was found. Classes that are not listed
were not tried with these versions: {versions(record)}.

{counts(outcomes)}. `python -m benchmarks.pages.families_page` writes this page; this part from {link(CLASSES)}, the
record of `tests/builder/class_sweep.py`, which goes on where it ended.

{table(("class", "outcome", "what was said"), rows)}"""


def generated() -> str:
    """Which classes generate what transformers generates."""
    record = load(NAME)
    outcomes = record["outcomes"]
    rows = [(f"`{name}`", entry["how"], shown(entry["said"], name)) for name, entry in sorted(outcomes.items())]
    return f"""{len(outcomes)} classes of transformers and variants of them, tiny and with random weights, exported with
caches: 32 greedy tokens of three prompts of different lengths, in one batch in ONNX Runtime, beside transformers' own
`generate`.
*equal*: all tokens; *near tie*: up to one of two tokens whose logits rounding decides; *refused*: one message. Classes
that are not listed were not tried with these versions: {versions(record)}.

{counts(outcomes)}; from {link(NAME)}, the record of `tests/builder/export/family_sweep.py`.

{table(("class or variant", "outcome", "what was said"), rows)}"""


def versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def counts(outcomes: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {how}" for how, count in Counter(entry["how"] for entry in outcomes.values()).items())


def shown(said: str, name: str) -> str:
    """A message in a cell: without the directory's name, general advice and the end of a long one."""
    line = " ".join(said.split()).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    for advice in _ADVICE:
        line = line.replace(advice, "")
    line = line.replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
