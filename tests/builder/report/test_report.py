"""What a report says of a plan."""

from dataclasses import asdict
from pathlib import Path

import pytest

from trt_nvfp4.builder.report.html import page
from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.builder.report.report import Report, subgraph_tables, summary_table
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.coverage import UnplannedProducts
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions


@pytest.mark.parametrize(
    ("target", "calibrated", "activations"),
    [
        ("h200", False, "FP8, scales computed at run time"),  # by the plugin
        ("h200", True, "FP8, calibrated scales"),
        ("ada", False, "as in the model (only weights are FP8)"),
        ("ada", True, "FP8, calibrated scales"),
    ],
)
def test_fp8_activations(gated_mlps: Path, target: str, calibrated: bool, activations: str) -> None:
    model = load(gated_mlps)
    capabilities = TARGETS[target].capabilities
    plan = make_plan(model, find_subgraphs(model), capabilities, PlanOptions(precision="fp8", calibrated=calibrated))
    report = Report(str(gated_mlps), target)
    report.take_plan(plan, calibrated)
    assert [entry["decision"] for entry in report.subgraphs] == ["fp8", "fp8"]
    assert {entry["activations"] for entry in report.subgraphs} == {activations}


@pytest.mark.parametrize(
    ("precision", "kept", "warned"), [("auto", 0, False), ("auto", 1, False), ("auto", 2, True), ("bf16", 2, False)]
)
def test_a_plan_without_nvfp4_is_warned_of_unless_asked_for(
    gated_mlps: Path, precision: str, kept: int, warned: bool
) -> None:
    model = load(gated_mlps)
    plan = make_plan(model, find_subgraphs(model), TARGETS["ada"].capabilities, PlanOptions(precision=precision))
    for entry in plan.subgraphs[:kept]:
        entry.decision = "keep"
    report = Report(str(gated_mlps), "ada")
    report.take_plan(plan, calibrated=False)
    assert [("no subgraph of the plan is in NVFP4" in warning) for warning in report.warnings] == [True] * warned
    empty = Report(str(gated_mlps), "ada")
    plan.subgraphs.clear()
    empty.take_plan(plan, calibrated=False)
    assert len(empty.warnings) == (precision == "auto")


def test_products_that_the_plan_has_no_entry_for(gated_mlps: Path) -> None:
    """One line, by operator, on the terminal and on the page; none where there are none."""
    report = Report(str(gated_mlps), "ada")
    assert "not in the plan" not in cells(report)
    found = {"Conv": UnplannedProducts(12, 3400, 0.34), "Einsum": UnplannedProducts(2, 4, 0.0004)}
    report.unplanned = {operator: asdict(products) for operator, products in found.items()}
    line = "12 Conv (34.0% of weight bytes), 2 Einsum (0.0%) stay as they are"
    assert cells(report)["not in the plan"] == line
    assert f'<p class="dim">Not in the plan: {line}.</p>' in page(report, None, "o")


def test_shapes_of_experts_and_layers() -> None:
    entry = {
        "name": "m",
        "kind": "moe",
        "decision": "keep",
        "reason": "why",
        "reason_code": None,
        "kernels": "",
        "realized": None,
    }
    widths = {"in_features": 64, "intermediate_features": 128, "out_features": 32}
    for more, shown in (
        ({"layers": 1}, "64-128-32"),
        ({"layers": 18}, "64-128-32 x18"),
        ({"experts": 8, "top_k": 2, "shared_features": 0}, "64-128-32 x2 of 8"),
        ({"experts": 8, "top_k": 2, "shared_features": 48}, "64-128-32 x2 of 8 + shared 48"),
    ):
        table, _ = subgraph_tables([{**entry, "shapes": widths | more}])
        assert list(table.columns[3].cells) == [shown]


def test_sizes_and_peaks(gated_mlps: Path) -> None:
    report = Report(str(gated_mlps), "ada", weights_bytes={"before": 4000, "after": 1000})
    assert cells(report)["weights"] == "4.0 kB -> 1.0 kB (4.00x smaller)"
    report.record_peak(10**12)  # of the build script, beside this process
    report.record_peak(0)
    assert report.peak_rss_bytes > 10**12


def cells(report: Report) -> dict[str, str]:
    """The summary: its first column, and the second."""
    names, values = (column.cells for column in summary_table(report).columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


def test_a_warning_of_several_parts_is_one() -> None:
    parts = {name: Report("m", "thor", subgraphs=[{"name": "s"}]) for name in "abc"}  # type: ignore[typeddict-item]
    parts["none"] = Report("m", "thor")
    for name, texts in {"a": ["x", "y"], "b": ["x"], "c": ["z", "x"], "none": ["x"]}.items():
        parts[name].warnings = texts
    report = PartsReport("m", "thor", "out", parts, warnings=["of the whole"])
    report.take_warnings()
    assert report.warnings == ["of the whole", "a, b, c: x", "a: y", "c: z"]
