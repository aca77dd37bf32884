"""What a manifest refuses: parts that do not fit each other, and files that are none."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import invoked
from rich.console import Console

from trt_nvfp4.builder.components.manifest import DIFFUSE, FILE, Flow, Loop, Manifest, Part, Port
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.prompts import with_features
from trt_nvfp4.builder.errors import USAGE, BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.generate.open import open_runner
from trt_nvfp4.builder.report.parts_tables import arrows, manifest_tables

X, Y = Port("float32", ("n", 4)), Port("float32", ("n", 8))
FIRST = Part("first", {"x": X}, {"y": Y})
SECOND = Part("second", {"y": Y, "time": Port("float32", (1,))}, {"z": Y})
IMAGE = {"token_id": 9, "tokens": 4, "grid": None, "alone": False, "prompt": None}
GOOD = Manifest("run", [FIRST, SECOND], [Flow("first.y", "second.y")])


def test_a_manifest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    looped = replace(SECOND, loop=Loop(2, {"z": "y"}, {"time": [1.0, 0.5]}))
    manifest = replace(GOOD, parts=[FIRST, looped], settings={"a": 1}, model="m").check()
    manifest.save(tmp_path)
    found = Manifest.load(tmp_path)
    assert json.loads(json.dumps(found.part("second").inputs["y"].shape)) == ["n", 8]
    assert (found.task, list(found.flows), found.settings, found.model) == ("run", GOOD.flows, {"a": 1}, "m")
    assert found.part("second").loop == looped.loop
    assert found.given().keys() == {"x"}  # the loop gives the time
    assert found.results().keys() == {"second.z"}


@pytest.mark.parametrize(
    "settings",
    [
        {"image": IMAGE, "groups": "prompt", "merge": 1},
        {"image": IMAGE | {"grid": [1, 4, 4], "prompt": ["<bos>", ":"]}, "groups": None, "merge": 2},
        {"source": "text", "start_tokens": [0]},
        {"embeds": {"longest": 7, "padding": None}},
    ],
)
def test_settings_that_the_tasks_have(settings: dict[str, Any]) -> None:
    assert replace(GOOD, settings=settings).check().settings == settings


def test_what_flows_is_drawn() -> None:
    caches = {f"past_key_values.{n}.key": X for n in range(2)}
    presents = {f"present.{n}.key": X for n in range(2)}
    decoder = Part("decoder", {"z": Y, "length": Y, **caches}, {"logits": Y, **presents})
    looped = replace(SECOND, loop=Loop(2, {"z": "y"}, {"time": [1.0, 0.5]}))
    flows = [*GOOD.flows, Flow("second.z", "decoder.z")]
    manifest = Manifest("generate", [FIRST, looped, decoder], flows).check()
    assert list(arrows(manifest)) == [
        ("given", ["x"], "first"),
        ("first", ["y"], "second"),
        ("second", ["z"], "second, 2 times"),
        ("given", ["length"], "decoder"),
        ("second", ["z"], "decoder"),
        ("decoder", list(caches), "decoder, next step"),
        ("decoder", ["logits"], "result"),
    ]
    console = Console(width=200, file=io.StringIO(), color_system=None, markup=False)
    console.print(*manifest_tables(manifest))
    drawn = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "decoder ── past_key_values.N.key (2) ──▶ decoder, next step" in drawn
    assert "present.N.key float32 [n, 4] (2)" in drawn


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"flows": [Flow("third.y", "second.y")]}, "the part 'third' is missing; it has first, second"),
        ({"flows": [Flow("first.a", "second.y")]}, "first has no output 'a'; it has y"),
        ({"flows": [Flow("first.y", "second.a")]}, "second has no input 'a'; it has y, time"),
        ({"flows": [Flow("second.z", "first.x")]}, "second runs after first; list it before"),
        (
            {"parts": [FIRST, replace(SECOND, inputs={"y": X})]},
            r"first.y -> second.y: float32 \[n, 8\] does not fit float32 \[n, 4\]",
        ),
        (
            {"parts": [FIRST, replace(SECOND, inputs={"y": Port("float16", ("n", 8))})]},
            r"float32 \[n, 8\] does not fit float16 \[n, 8\]",
        ),
        ({"parts": [FIRST, FIRST], "flows": []}, "two parts are called 'first'"),
        ({"parts": [replace(FIRST, name="../a")], "flows": []}, "a part is called '../a'"),
        ({"parts": [], "flows": []}, "there is no part"),
        ({"settings": {"embeds": {"padding": None}}}, "its embeds lack longest or padding"),
        ({"settings": {"embeds": {"longest": "7", "padding": None}}}, "its embeds' longest is '7', expected 1 or more"),
        ({"settings": {"embeds": {"longest": 7, "padding": -1}}}, "its embeds' padding is -1, expected a token's"),
        ({"settings": {"embeds": None}}, "its embeds lack longest"),
        ({"settings": {"image": {"token_id": 1, "tokens": 2, "prompt": None}}}, "its image lacks grid, alone"),
        ({"settings": {"image": [1]}}, "its image lacks token_id"),
        ({"settings": {"image": IMAGE | {"token_id": 1.0}}}, "its image's token_id is 1.0, expected a token's"),
        ({"settings": {"image": IMAGE | {"tokens": 0}}}, "its image's tokens are 0, expected 1 or more"),
        ({"settings": {"image": IMAGE | {"alone": 1}}}, "its image's alone is 1, expected true or false"),
        ({"settings": {"image": IMAGE | {"grid": [1, 4]}}}, r"its image's grid is \[1, 4\], expected three numbers"),
        ({"settings": {"image": IMAGE | {"prompt": ["a", 1]}}}, "its image's prompt is .* expected the texts"),
        ({"settings": {"image": IMAGE, "merge": 2}}, "its groups are 'none given', expected 'prompt'"),
        ({"settings": {"image": IMAGE, "merge": 2, "groups": ["prompt"]}}, r"its groups are \['prompt'\]"),
        ({"settings": {"image": IMAGE, "groups": None}}, "its merge is None, expected 1 or more"),
        ({"settings": {"source": "smell", "start_tokens": [0]}}, "its source is 'smell', expected text, sound, images"),
        ({"settings": {"source": ["text"], "start_tokens": [0]}}, r"its source is \['text'\]"),
        ({"settings": {"source": "text"}}, "its start_tokens are None, expected tokens' numbers"),
        ({"settings": {"source": "text", "start_tokens": [True]}}, r"its start_tokens are \[True\]"),
        ({"task": "dance"}, "the task is 'dance', expected run or generate"),
        ({"parts": [FIRST, replace(SECOND, loop=Loop(0))]}, "second runs 0 times"),
        ({"parts": [FIRST, replace(SECOND, loop=Loop(2, {"a": "y"}))]}, "output 'a' cannot go into its input 'y'"),
        ({"parts": [FIRST, replace(SECOND, loop=Loop(2, {"z": "time"}))]}, r"does not fit its input time"),
        ({"parts": [FIRST, replace(SECOND, loop=Loop(2, {}, {"time": [1.0]}))]}, "1 numbers for time, and it runs 2"),
        (
            {"parts": [FIRST, replace(SECOND, loop=Loop(1, {}, {"y": [1.0]}))]},
            "is given numbers and has no fixed shape",
        ),
        (
            {"parts": [FIRST, Part("second", {"x": Y}, {"z": Y})], "flows": []},
            r"first and second both take the input x, as float32 \[n, 4\] and as float32 \[n, 8\]",
        ),
    ],
)
def test_parts_that_do_not_fit(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    manifest = replace(GOOD, **changed)
    manifest.save(tmp_path)
    with pytest.raises(ModelFaultError, match=message) as failure:
        Manifest.load(tmp_path)
    assert str(tmp_path / FILE) in str(failure.value)


CALL = {
    "method": "decode",
    "is_denoiser": False,
    "constants": {},
    "result": {"sample": "out.0", "rest": [None]},
    "types": {"out.0": "float16"},
    "shapes": {"x": [[1, 4], [2, 4]]},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": ["decode"]}, r"the method of first is \['decode'\], expected forward or decode"),
        ({"types": {"out.0": ["float16"]}}, "the types of first are .* expected some of float32"),
        ({"result": ["out.1"]}, r"the result of first is \['out.1'\], expected some of out.0"),
        ({"result": [[{"sample": 3}]]}, "the result of first is .* expected some of out.0"),
        ({"result": {"class": "out.0"}}, "the result of first is .* expected some of out.0"),
        ({"shapes": {"x": [[1, 4]]}}, "the shapes of first's input x are .* expected the smallest and the largest"),
    ],
)
def test_calls_of_a_pipeline(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    manifest = Manifest(DIFFUSE, [FIRST], (), {"calls": {"first": CALL}})
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path).settings["calls"]["first"] == CALL
    replace(manifest, settings={"calls": {"first": CALL | changed}}).save(tmp_path)
    with pytest.raises(ModelFaultError, match=message):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', "[" * 100000, '{"format": 1, "parts": [{"name": 1}]}']
)
def test_files_that_are_no_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelFaultError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    replace(GOOD, parts=[FIRST, replace(SECOND, loop=Loop(2))]).save(tmp_path)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"times": 2', '"times": 1e999'))
    with pytest.raises(BuilderError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_a_folder_without_parts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no parts of a model"):
        Manifest.load(tmp_path)
    with pytest.raises(ModelFaultError, match="nowhere: no such file or folder"):
        Pipeline(tmp_path / "nowhere")


def test_every_image_gets_its_features() -> None:
    assert list(with_features([[1, 9, 2, 9], [9]], 3, 9, 2)) == [[1, 9, 9, 2, 9, 9], [9, 9]]
    assert list(with_features([[1, 9, 9]], 1, 9, 2)) == [[1, 9, 9]]
    assert list(with_features([[1, 2]], 0, 9, 2)) == [[1, 2]]
    with pytest.raises(BuilderError, match=r"image token <image> .9. 1 times, and 2 images of 2 features .*write it"):
        list(with_features([[9]], 2, 9, 2, "<image>"))


def test_a_generator_names_what_runs_parts(tmp_path: Path) -> None:
    GOOD.save(tmp_path)
    with pytest.raises(UsageError, match=r"which trt_nvfp4\.Pipeline runs"):
        open_runner(tmp_path)


def test_commands_know_parts(tmp_path: Path) -> None:
    from trt_nvfp4.builder.cli import build_engine, inspect_engine

    GOOD.save(tmp_path)
    shown = invoked(inspect_engine.app, [tmp_path, "--json"])
    assert json.loads(shown.stdout)["built"] == {"first": "no engine yet", "second": "no engine yet"}
    (tmp_path / "model.py").write_text("raise SystemExit('no')")
    arguments = ["--target", "rtx-blackwell", "-o", str(tmp_path / "out")]
    refused = invoked(build_engine.app, [f"{tmp_path / 'model.py'}:components", *arguments], USAGE)
    assert "does not run: SystemExit" in refused.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
