"""What a report says of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_nvfp4.builder.report import Report
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.graph_passes.find import find_subgraphs
from trt_nvfp4.graph_passes.plan import make_plan
from trt_nvfp4.graph_passes.source import load


@pytest.mark.parametrize(
    ("target", "calibrated", "activations"),
    [
        ("h200", False, "FP8, scales computed at run time"),  # by the plugin
        ("h200", True, "FP8, calibrated scales"),
        ("ada", False, "as in the model (weights alone are FP8)"),
        ("ada", True, "FP8, calibrated scales"),
    ],
)
def test_fp8_activations(gated_mlps: Path, target: str, calibrated: bool, activations: str) -> None:
    model = load(gated_mlps)
    capabilities = TARGETS[target].capabilities
    plan = make_plan(model, find_subgraphs(model), capabilities, "fp8", calibrated=calibrated)
    report = Report(str(gated_mlps), target)
    report.take_plan(plan, calibrated)
    assert [entry["decision"] for entry in report.subgraphs] == ["fp8", "fp8"]
    assert {entry["activations"] for entry in report.subgraphs} == {activations}
