"""Engines of a folder that do not carry their plugin library share one."""

import json
from pathlib import Path
from typing import Any

import pytest

from trt_nvfp4.builder.pipeline.shared_library import kernels_beside, share_library
from trt_nvfp4.builder.report.report import Report

VERSIONS = {"trt-nvfp4": "1"}


def built(folder: Path, name: str, **report: Any) -> None:
    told = {"target": "h200", "versions": VERSIONS, "plugin_library": f"{name}.so", "kernels": [name]} | report
    (folder / f"{name}.report.json").write_text(json.dumps(told))
    (folder / f"{name}.report.html").write_text(f"load_library('{told['plugin_library']}')")
    (folder / f"{name}.so").touch()


@pytest.mark.parametrize(
    "other",
    [
        {"target": "thor"},
        {"versions": {"trt-nvfp4": "2"}},
        {"plugin_library": None},
        {"plugin_library": "../else.so"},
        {"kernels": None},
    ],
)
def test_the_last_library_replaces_those_of_the_same_version_and_target(tmp_path: Path, other: dict[str, Any]) -> None:
    built(tmp_path, "mlp")
    built(tmp_path, "other", **other)
    built(tmp_path, "linear")  # which is built again
    report = Report("m.onnx", "h200", versions=VERSIONS, plugin_library="both.so")
    engine = tmp_path / "linear.engine"
    assert kernels_beside(engine, report) == {"mlp"}
    (tmp_path / "both.so").touch()
    share_library(engine, report)
    assert json.loads((tmp_path / "mlp.report.json").read_text())["plugin_library"] == "both.so"
    assert (tmp_path / "mlp.report.html").read_text() == "load_library('both.so')"
    assert sorted(path.name for path in tmp_path.glob("*.so")) == ["both.so", "linear.so", "other.so"]
