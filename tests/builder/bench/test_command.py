"""bench-engine as a command: messages, exit codes, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_stand_ins import Recorded, planned
from typer.testing import CliRunner

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.bench import bench
from trt_nvfp4.builder.bench import result as result_room
from trt_nvfp4.builder.bench.result import Result
from trt_nvfp4.builder.cli.bench_engine import app
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_nothing_replaced_is_nothing_to_predict(gated_mlps: Path, as_json: list[str]) -> None:
    plan = Plan.load(planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision = "keep"
    plan.save(gated_mlps.with_name("kept.yaml"))
    arguments = [str(gated_mlps), "--mode", "roofline", "--plan", str(gated_mlps.with_name("kept.yaml"))]
    shown = CliRunner().invoke(app, [*arguments, *as_json])
    assert shown.exit_code == errors.USAGE
    assert "the plan replaces no subgraph for rtx-blackwell" in shown.stderr


def test_command(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor", "--mode", "roofline"]
    shown = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "b.json"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == json.loads((tmp_path / "b.json").read_text())
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0
    assert "predicted" in table.stdout
    assert "Jetson Thor data sheet" in table.stdout


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("none.engine", "no such file", errors.MODEL_AT_FAULT),
        ("notes.txt", "expected an engine", errors.USAGE),
        ("lonely.engine", "add --model", errors.USAGE),
    ],
)
def test_command_errors(tmp_path: Path, name: str, message: str, code: int) -> None:
    if not name.startswith("none"):
        (tmp_path / name).write_text("?")
    shown = CliRunner().invoke(app, [str(tmp_path / name), "--target", "thor"])
    assert shown.exit_code == code
    assert message in shown.stderr


def test_an_exported_original_lies_beside_the_engine(tmp_path: Path) -> None:
    """Whatever folder was the current one when both were made."""
    (tmp_path / "o.engine").write_text("?")
    report = {"model": "models/m", "files": {"exported model": "engines/o.onnx"}}
    (tmp_path / "o.report.json").write_text(json.dumps(report))
    shown = CliRunner().invoke(app, [str(tmp_path / "o.engine"), "--target", "thor"])
    assert shown.exit_code == errors.USAGE
    assert f"add --model ({tmp_path / 'o.onnx'} is not there)" in shown.stderr


def test_a_folder_in_place_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "o.engine").write_text("?")
    shown = CliRunner().invoke(app, [str(tmp_path / "o.engine"), "--model", str(tmp_path), "--target", "thor"])
    assert shown.exit_code == errors.USAGE
    assert f"add --model ({tmp_path} is no file)" in shown.stderr


def test_data_that_is_not_there_and_a_place_that_cannot_be_written(gated_mlps: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor"]
    for data in ("nowhere", "nowhere.py:samples"):
        shown = CliRunner().invoke(app, [*arguments, "--calib-data", data])
        assert shown.exit_code == errors.USAGE
        assert f"--calib-data {data}: no such file" in shown.stderr
    shown = CliRunner().invoke(app, [*arguments, "-o", "/proc/b.json"])
    assert shown.exit_code == errors.BUILD_FAILED
    assert "error: /proc: " in shown.stderr, "and not the temporary file's name"


def test_a_new_folder_is_made_for_the_result(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor", "--mode", "roofline"]
    result = tmp_path / "new" / "folder" / "x.bench.json"
    failed = CliRunner().invoke(app, [*arguments, "-o", str(result), "--calib-data", "nowhere"])
    assert failed.exit_code == errors.USAGE
    assert not (tmp_path / "new").exists()
    shown = CliRunner().invoke(app, [*arguments, "-o", str(result)])
    assert shown.exit_code == 0, shown.output
    assert json.loads(result.read_text())["mode"] == "roofline"


@pytest.mark.parametrize("name", ["model.onnx", "o.plan.yaml", "."])
def test_nothing_else_is_written_over(
    gated_mlps: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(gated_mlps.parent)
    Path("o.plan.yaml").write_bytes(planned(gated_mlps).read_bytes())
    before = {file: file.read_bytes() for file in Path().iterdir() if file.is_file()}
    arguments = ["model.onnx", "--target", "thor", "--mode", "roofline", "-o"]
    shown = CliRunner().invoke(app, [*arguments, name])
    assert shown.exit_code == errors.USAGE
    assert f"-o {name}: is " in shown.stderr
    assert {file: file.read_bytes() for file in Path().iterdir() if file.is_file()} == before
    for _ in range(2):
        assert CliRunner().invoke(app, [*arguments, "o.bench.json"]).exit_code == 0


def test_a_place_is_tried_before_the_work(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "bench", lambda *_: pytest.fail("worked before"))
    shown = CliRunner().invoke(app, [str(gated_mlps), "--target", "thor", "-o", str(gated_mlps / "b.json")])
    assert shown.exit_code == errors.BUILD_FAILED
    assert f"error: {gated_mlps}: File exists, and is no folder, which is needed there" in shown.stderr


def test_the_model_of_an_engine_is_the_one_planned_for(gated_mlps: Path, save_gated_mlps: Callable[..., Path]) -> None:
    engine = planned(gated_mlps).with_name("o.engine")
    engine.write_bytes(b"an engine that is not run")
    other = save_gated_mlps(gated_mlps.with_name("other.onnx"), layers=1)
    arguments = [str(engine), "--mode", "roofline"]
    shown = CliRunner().invoke(app, [*arguments, "--model", str(other)])
    assert shown.exit_code == errors.USAGE
    assert "plan this model anew" in shown.stderr
    plan = Plan.load(engine.with_suffix(".plan.yaml"))
    plan.subgraphs[0].decision = "nvfp4_w4a4"
    plan.save(engine.with_suffix(".plan.yaml"))
    shown = CliRunner().invoke(app, [*arguments, "--model", str(gated_mlps), "--target", "h100"])
    assert shown.exit_code == errors.USAGE
    assert "it cannot be nvfp4_w4a4: h100 does not compute nvfp4_w4a4" in shown.stderr
    shown = CliRunner().invoke(app, [str(gated_mlps), "--target", "thor", "--model", str(other)])
    assert shown.exit_code == errors.USAGE
    assert "leave that out" in shown.stderr


def test_command_takes_the_original(gated_mlps: Path) -> None:
    rewritten = gated_mlps.parent / "out" / "o.engine"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, rewritten, stop_after="rewrite"), Recorded())
    shown = CliRunner().invoke(app, [str(rewritten.with_suffix(".rewritten.onnx")), "--target", "thor"])
    assert shown.exit_code == errors.USAGE
    assert "the original ONNX and --plan" in shown.stderr
    rewritten.write_text("an engine that was built from the rewritten model")
    engine = [str(rewritten), "--model", str(rewritten.with_suffix(".rewritten.onnx")), "--target", "thor"]
    shown = CliRunner().invoke(app, engine)
    assert shown.exit_code == errors.USAGE
    assert "which has been rewritten; add --model with the original ONNX" in shown.stderr
    plan = Plan.load(rewritten.with_suffix(".plan.yaml"))
    plan.subgraphs[0].decision = "nvfp4_w4a4"
    plan.save(edited := gated_mlps.parent / "edited.yaml")
    shown = CliRunner().invoke(app, [str(gated_mlps), "--target", "ada", "--plan", str(edited)])
    assert shown.exit_code == errors.USAGE
    assert "it cannot be nvfp4_w4a4" in shown.stderr
    misfit = CliRunner().invoke(app, [str(gated_mlps), "--target", "thor", "--shapes", "x:1x65"])
    assert misfit.exit_code == errors.USAGE
    assert "--shapes x:1x65 does not fit" in misfit.stderr


def test_result_of_an_engine_shows_on_its_page(gated_mlps: Path) -> None:
    engine = gated_mlps.parent / "out" / "o.engine"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, engine, stop_after="rewrite"), Recorded())
    engine.write_bytes(b"an engine that is not run")
    before = engine.with_suffix(".report.html").read_text()
    shown = CliRunner().invoke(app, [str(engine), "--mode", "roofline"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(engine.with_suffix(".bench.json").read_text())["mode"] == "roofline"
    assert engine.with_suffix(".report.html").read_text() != before
    engine.with_suffix(".report.json").write_text("{}")
    arguments = [str(engine), "--mode", "roofline", "--model", str(gated_mlps), "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "no page shows this: " in json.loads(shown.stdout)["notes"][-1]


def test_temporary_files_lie_where_the_result_will(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []
    out = tmp_path
    monkeypatch.setattr(bench, "bench", lambda request, _: asked.append(request.folder) or Result("", "", ""))
    monkeypatch.setattr(result_room, "tables", lambda _: [])
    for arguments in ([str(out / "o.engine")], [str(gated_mlps), "-o", str(out / "b.json")], [str(gated_mlps)]):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
    assert asked == [out, out, None]
