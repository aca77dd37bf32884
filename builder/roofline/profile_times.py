"""The least cost of a decoder's planned subgraphs in each of its engine's profiles, prefill and decode."""

from collections.abc import Mapping, Sequence
from typing import Final

from trt_nvfp4.builder.records.contents import Prediction, Roofline
from trt_nvfp4.graph_passes.planning.kinds.registry import KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan

PREFILL: Final = "prefill"
DECODE = "decode"
Predicted = Sequence[Prediction]


def products(predicted: Predicted) -> list[Prediction]:
    """Predictions of products with weights: attention's cost in a prefill follows the prompt's length squared."""
    return [entry for entry in predicted if entry["kind"] in KINDS and KINDS[entry["kind"]].has_weights]


def note_profiles(plan: Plan, profiles: Mapping[str, Predicted]) -> None:
    """Writes into each entry, behind its kernels, rows and least time in each profile. `profiles` are predictions of
    `roofline.predict`, by profile."""
    said: dict[str, list[str]] = {}
    for profile, predicted in profiles.items():
        for entry in products(predicted):
            rows = f"{entry['tokens']} row{'s' if entry['tokens'] != 1 else ''}"
            least = f"{entry['predicted_us']['nvfp4']:.3g} us, bound by {entry['bound']}"
            for name in entry["names"]:
                said.setdefault(name, []).append(f"{profile} of {rows} at least {least}")
    for subgraph in plan.subgraphs:
        if subgraph.name in said and subgraph.kernels:
            subgraph.kernels += f"; {'; '.join(said[subgraph.name])}"


def profiles_line(predicted: Roofline | None) -> str:
    """A decoder's two profiles in one line, from a report's `predicted`; empty without profiles."""
    if predicted is None or PREFILL not in predicted:
        return ""
    parts = []
    for profile, of in ((PREFILL, predicted["prefill"]), (DECODE, predicted["subgraphs"])):
        if entries := products(of):
            total = sum(entry["predicted_us"]["nvfp4"] for entry in entries)
            rows = max(entry["tokens"] for entry in entries)
            parts.append(f"{profile} of {rows} row{'s' if rows != 1 else ''} {total:.3g} us")
    if not parts:
        return ""
    return f"{', '.join(parts)} at least in the planned products (predicted by the roofline, nothing was run)"
