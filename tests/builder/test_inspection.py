"""inspect-engine on every kind of file (bundles: test_bundle.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trt_nvfp4.builder import errors, pipeline
from trt_nvfp4.builder.cli.inspect_engine import app
from trt_nvfp4.builder.targets import find_target


class Silent:
    def stage(self, text: str) -> None:
        pass

    def step(self, done: int, total: int, text: str = "") -> None:
        pass


@pytest.fixture
def out(gated_mlps: Path) -> Path:
    """Plan, rewritten model and report of a run that stopped before the build, and an engine of unknown origin."""
    folder = gated_mlps.parent / "out"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, folder / "o.engine", stop_after="rewrite"), Silent())
    (folder / "o.engine").write_bytes(b"not read")
    return folder


@pytest.mark.parametrize(
    ("file", "kind", "texts"),
    [
        ("o.plan.yaml", "plan", ["gated_mlp_1", "nvfp4_w4a16", "64-128-64"]),
        ("o.report.json", "report", ["gated_mlp_1", "rtx-blackwell", "smaller"]),
        ("o.rewritten.onnx", "model", ["gated_mlp_1: NVFP4GatedMLP", "x: float16 [tokens, 64]", "trt_nvfp4: 1"]),
        ("o.engine", "engine", ["8 bytes", "of another engine"]),
    ],
)
def test_each_kind_of_file(out: Path, file: str, kind: str, texts: list[str]) -> None:
    shown = CliRunner().invoke(app, [str(out / file)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for text in texts:
        assert text in shown.stdout
    as_json = CliRunner().invoke(app, [str(out / file), "--json"])
    assert json.loads(as_json.stdout)["kind"] == kind


def test_engine_without_its_report(out: Path) -> None:
    (out / "o.report.json").unlink()
    shown = CliRunner().invoke(app, [str(out / "o.engine")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "without the target's GPU" in shown.stdout


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("none.yaml", None, "no such file"),
        ("x.txt", "x", "expected a plan"),
        ("x.json", "{", "not JSON"),
        ("x.json", "{}", "not a report"),
        ("x.onnx", "x" * 50, "not an ONNX file"),
        ("folder", "", "not a bundle"),
    ],
)
def test_what_cannot_be_inspected(tmp_path: Path, file: str, content: str | None, text: str) -> None:
    path = tmp_path / file
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    shown = CliRunner().invoke(app, [str(path)])
    assert shown.exit_code == errors.USAGE
    assert text in " ".join(shown.stderr.split())
