"""bench-engine as a command: messages, exit codes, files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_stand_ins import Recorded, planned
from click.testing import CliRunner
from command_lines import invoked

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.bench import bench
from trt_nvfp4.builder.bench import result as result_room
from trt_nvfp4.builder.bench.result import Result
from trt_nvfp4.builder.cli.bench_engine import app
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan


def test_command(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor", "--mode", "roofline"]
    shown = invoked(app, [*arguments, "-o", tmp_path / "b.json", "--json"])
    assert json.loads(shown.stdout) == json.loads((tmp_path / "b.json").read_text())
    table = invoked(app, arguments)
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
    invoked(app, [tmp_path / name, "--target", "thor"], code, message)


def test_an_exported_original_lies_beside_the_engine(tmp_path: Path) -> None:
    """Whatever folder was the current one when both were made."""
    (tmp_path / "o.engine").write_text("?")
    report = {"model": "models/m", "files": {"exported model": "engines/o.onnx"}}
    (tmp_path / "o.report.json").write_text(json.dumps(report))
    invoked(
        app,
        [tmp_path / "o.engine", "--target", "thor"],
        errors.USAGE,
        f"add --model ({tmp_path / 'o.onnx'} is not there)",
    )


def test_a_folder_in_place_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "o.engine").write_text("?")
    invoked(
        app,
        [tmp_path / "o.engine", "--model", tmp_path, "--target", "thor"],
        errors.USAGE,
        f"add --model ({tmp_path} is not a file)",
    )


def test_data_that_is_not_there_and_a_place_that_cannot_be_written(gated_mlps: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor"]
    for data in ("nowhere", "nowhere.py:samples"):
        invoked(app, [*arguments, "--calib-data", data], errors.USAGE, f"--calib-data {data}: no such file")
    shown = invoked(app, [*arguments, "-o", "/proc/b.json"], errors.BUILD_FAILED)
    assert "error: /proc: " in shown.stderr, "and not the temporary file's name"


def test_a_new_folder_is_made_for_the_result(gated_mlps: Path, tmp_path: Path) -> None:
    arguments = [str(gated_mlps), "--target", "thor", "--mode", "roofline"]
    result = tmp_path / "new" / "folder" / "x.bench.json"
    invoked(app, [*arguments, "-o", result, "--calib-data", "nowhere"], errors.USAGE)
    assert not (tmp_path / "new").exists()
    invoked(app, [*arguments, "-o", result])
    assert json.loads(result.read_text())["mode"] == "roofline"


@pytest.mark.parametrize("name", ["model.onnx", "o.plan.yaml", "."])
def test_nothing_else_is_written_over(
    gated_mlps: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(gated_mlps.parent)
    Path("o.plan.yaml").write_bytes(planned(gated_mlps).read_bytes())
    before = {file: file.read_bytes() for file in Path().iterdir() if file.is_file()}
    arguments = ["model.onnx", "--target", "thor", "--mode", "roofline", "-o"]
    invoked(app, [*arguments, name], errors.USAGE, f"-o {name}: is ")
    assert {file: file.read_bytes() for file in Path().iterdir() if file.is_file()} == before
    for _ in range(2):
        assert CliRunner().invoke(app, [*arguments, "o.bench.json"]).exit_code == 0


def test_a_place_is_tried_before_the_work(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "bench", lambda *_: pytest.fail("worked before"))
    invoked(
        app,
        [gated_mlps, "--target", "thor", "-o", gated_mlps / "b.json"],
        errors.BUILD_FAILED,
        f"error: {gated_mlps}: File exists, and is not a folder, as it must be",
    )


def test_the_model_of_an_engine_is_the_one_planned_for(gated_mlps: Path, save_gated_mlps: Callable[..., Path]) -> None:
    engine = planned(gated_mlps).with_name("o.engine")
    engine.write_bytes(b"an engine that is not run")
    other = save_gated_mlps(gated_mlps.with_name("other.onnx"), layers=1)
    arguments = [str(engine), "--mode", "roofline"]
    invoked(app, [*arguments, "--model", other], errors.USAGE, "plan this model anew")
    plan = Plan.load(engine.with_suffix(".plan.yaml"))
    plan.subgraphs[0].decision = "nvfp4_w4a4"
    plan.save(engine.with_suffix(".plan.yaml"))
    invoked(
        app,
        [*arguments, "--model", gated_mlps, "--target", "h100"],
        errors.USAGE,
        "it cannot be nvfp4_w4a4: h100 does not compute nvfp4_w4a4",
    )
    invoked(app, [gated_mlps, "--target", "thor", "--model", other], errors.USAGE, "leave that out")


def test_command_takes_the_original(gated_mlps: Path) -> None:
    rewritten = gated_mlps.parent / "out" / "o.engine"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, rewritten, stop_after="rewrite"), Recorded())
    invoked(
        app,
        [rewritten.with_suffix(".rewritten.onnx"), "--target", "thor"],
        errors.USAGE,
        "the original ONNX and --plan",
    )
    rewritten.write_text("an engine that was built from the rewritten model")
    engine = [str(rewritten), "--model", str(rewritten.with_suffix(".rewritten.onnx")), "--target", "thor"]
    invoked(app, engine, errors.USAGE, "which has been rewritten; add --model with the original ONNX")
    plan = Plan.load(rewritten.with_suffix(".plan.yaml"))
    plan.subgraphs[0].decision = "nvfp4_w4a4"
    plan.save(edited := gated_mlps.parent / "edited.yaml")
    invoked(app, [gated_mlps, "--target", "ada", "--plan", edited], errors.USAGE, "it cannot be nvfp4_w4a4")
    invoked(app, [gated_mlps, "--target", "thor", "--shapes", "x:1x65"], errors.USAGE, "--shapes x:1x65 does not fit")


def test_result_of_an_engine_shows_on_its_page(gated_mlps: Path) -> None:
    engine = gated_mlps.parent / "out" / "o.engine"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, engine, stop_after="rewrite"), Recorded())
    engine.write_bytes(b"an engine that is not run")
    before = engine.with_suffix(".report.html").read_text()
    invoked(app, [engine, "--mode", "roofline"])
    assert json.loads(engine.with_suffix(".bench.json").read_text())["mode"] == "roofline"
    assert engine.with_suffix(".report.html").read_text() != before
    engine.with_suffix(".report.json").write_text("{}")
    arguments = [str(engine), "--mode", "roofline", "--model", str(gated_mlps), "--json"]
    shown = invoked(app, arguments)
    assert "page cannot show this: " in json.loads(shown.stdout)["notes"][-1]


def test_temporary_files_lie_where_the_result_will(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path | None] = []
    out = tmp_path
    (out / "o.engine").touch()
    monkeypatch.setattr(bench, "bench", lambda request, _: asked.append(request.folder) or Result("", "", ""))
    monkeypatch.setattr(result_room, "tables", lambda _: [])
    for arguments in ([str(out / "o.engine")], [str(gated_mlps), "-o", str(out / "b.json")], [str(gated_mlps)]):
        invoked(app, arguments)
    assert asked == [out, out, None]
