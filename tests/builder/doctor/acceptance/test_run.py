"""The acceptance run reports what each step really did: wrong outputs, crashes and hangs included."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_nvfp4.builder.cli.doctor import app
from trt_nvfp4.builder.doctor.acceptance import page, run, work
from trt_nvfp4.builder.doctor.acceptance.steps import VARIANTS, Outcome, Step, steps
from trt_nvfp4.builder.errors import UNAVAILABLE, USAGE, VERIFICATION_FAILED, BuilderError
from trt_nvfp4.builder.targets import TARGETS

TARGET = TARGETS["rtx-blackwell"]
FIRST = VARIANTS[0]
#: Stages of the worker that stand for what may happen on a machine.
STAND_INS = """
import os, sys, time
from pathlib import Path
from trt_nvfp4.builder.doctor.acceptance import work
from trt_nvfp4.builder.errors import VerificationError
def wrong(variant, folder, target):
    raise VerificationError("SQNR 3.0 dB against ONNX Runtime, expected 30")
def defect(variant, folder, target):
    raise KeyError("graph")
def crash(variant, folder, target):
    print("TensorRT: an illegal instruction", flush=True)
    os.abort()
def hang(variant, folder, target):
    time.sleep(1000)
def leave(variant, folder, target):
    os._exit(0)
def good(variant, folder, target):
    with open(folder.parent / "count", "a") as file:
        file.write(".")
    return {"SQNR dB": 51.0}
work.STAGES |= dict(wrong=wrong, defect=defect, crash=crash, hang=hang, leave=leave, good=good)
from trt_nvfp4.builder.doctor.acceptance.steps import Step, VARIANTS
work.steps = lambda builds: [Step(VARIANTS[0], stage, stage, (), 1) for stage in work.STAGES]
sys.exit(work.main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
"""


def step(stage: str, after: Step | None = None, **changed: Any) -> Step:
    return replace(Step(FIRST, stage, stage, (), 60, after), **changed)


@pytest.fixture
def taken(tmp_path: Path) -> Any:
    worker = tmp_path / "worker.py"
    worker.write_text(STAND_INS)

    def take(*chosen: Step) -> list[Outcome]:
        shown: list[Outcome] = []
        found = run.accept(tmp_path / "out", TARGET, shown.append, (sys.executable, str(worker)), chosen)
        assert shown == found
        written = json.loads((tmp_path / "out" / run.RESULT).read_text())
        assert [outcome["state"] for outcome in written["steps"].values()] == [outcome.state for outcome in found]
        return found

    return take


@pytest.mark.slow
def test_what_goes_wrong_is_reported(taken: Any, tmp_path: Path) -> None:
    good, crash = step("good"), step("crash")
    chosen = [good, step("wrong"), step("defect"), crash, step("engine", crash), step("hang", limit=12), step("leave")]
    found = {outcome.title: outcome for outcome in taken(*chosen)}
    assert found["good"].numbers == {"SQNR dB": 51.0}
    assert {title: outcome.state for title, outcome in found.items()} == {
        "good": "passed",
        "wrong": "failed",
        "defect": "failed",
        "crash": "crashed",
        "engine": "skipped",
        "hang": "timed out",
        "leave": "crashed",
    }
    assert found["wrong"].detail == "SQNR 3.0 dB against ONNX Runtime, expected 30"
    assert found["defect"].detail == "KeyError: 'graph'"
    assert "SIGABRT" in found["crash"].detail
    assert "an illegal instruction" in found["crash"].detail
    assert found["engine"].detail == "crash: crashed"
    assert "within 12 s" in found["hang"].detail
    assert "status 0" in found["leave"].detail
    # What passed is not done again; what failed is.
    assert [outcome.state for outcome in taken(good, step("wrong"))] == ["passed", "failed"]
    assert (tmp_path / "out" / "count").read_text() == "."


def test_what_the_machine_lacks_is_skipped(taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(TARGET), "unsupported_here", lambda target: "it needs tensorrt-rtx, which is not installed"
    )
    monkeypatch.setattr(run, "local_driver", lambda: None)
    found = taken(step("engine", needs=("tensorrt",)), step("plugins", needs=("gpu",)))
    assert [outcome.state for outcome in found] == ["skipped", "skipped"]
    assert found[0].detail == "it needs tensorrt-rtx, which is not installed"
    assert "no NVIDIA driver" in found[1].detail


@pytest.mark.parametrize("builds", [True, False])
def test_steps_stand_behind_what_they_need(builds: bool) -> None:
    found = steps(builds)
    assert all(("built" in taken.title) == builds for taken in found if taken.stage == "build")
    assert len({step.key for step in found}) == len(found)
    for number, taken in enumerate(found):
        assert taken.stage in work.STAGES
        assert taken.after is None or taken.after in found[:number]


@pytest.mark.parametrize("wrong", [lambda y: y * 1.1, lambda y: np.where(y > 2, np.nan, y), lambda y: y[:, :1]])
def test_wrong_outputs_are_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    from trt_nvfp4.builder.accuracy import runners

    monkeypatch.setattr(runners, "run", lambda model, inputs: {"y": inputs["x"] * 2})
    agreement = work._agreement(Path("model.onnx"), lambda inputs: {"y": inputs["x"] * np.float16(2.001)})
    assert 50 < agreement["SQNR dB"] < 70
    with pytest.raises(BuilderError) as failure:
        work._agreement(Path("model.onnx"), lambda inputs: {"y": wrong(inputs["x"] * 2)})
    assert failure.value.exit_code == VERIFICATION_FAILED


@pytest.mark.slow
def test_a_variant_is_built_and_its_plugins_compared(tmp_path: Path) -> None:
    """Without a GPU the plugins' references run in Torch, against the function bodies in ONNX Runtime."""
    variant = VARIANTS[0]
    built = work.build(variant, tmp_path / variant.key, TARGET.name)
    assert built["replaced"] == 2
    assert built["engine bytes"] > 0
    assert work.plugins(variant, tmp_path / variant.key, TARGET.name)["SQNR dB"] > work.LEAST_SQNR_DB


def test_page(tmp_path: Path) -> None:
    outcomes = [
        Outcome("a <b>", "built", "passed", seconds=3.5, numbers={"engine bytes": 2297972.0}),
        Outcome("a <b>", "runs", "timed out", "it did not end within 9 s"),
    ]
    text = page.write(tmp_path, "thor", [], outcomes).read_text()
    assert "1 steps passed, 1 failed, 0 skipped" in text
    assert "engine bytes 2,297,972.0" in text
    assert "a &lt;b&gt;" in text
    assert "<script" not in text


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    return int(ended.value.code or 0)


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--target", "thor") == USAGE
    assert "--target is an option of the acceptance run: add --run" in capsys.readouterr().err
    monkeypatch.setattr(run, "local_driver", lambda: None)
    assert call("--run", "-o", str(tmp_path)) == UNAVAILABLE
    assert "--target NAME takes the steps that need none" in capsys.readouterr().err

    def accept(folder: Path, target: Any, show: Any, *rest: Sequence[Any]) -> list[Outcome]:
        (folder / run.RESULT).write_text("{}")
        return [Outcome("mlp", "built", "failed", "no subgraph was replaced")]

    monkeypatch.setattr(run, "accept", accept)
    assert call("--run", "--target", "ada", "-o", str(tmp_path)) == VERIFICATION_FAILED
    assert "1 steps failed: mlp: built" in capsys.readouterr().err
    assert (tmp_path / page.PAGE).is_file()
