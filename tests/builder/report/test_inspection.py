"""inspect-engine on every kind of file (bundles: test_bundle.py)."""

import hashlib
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from command_lines import invoked
from onnx import parser

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.inspect_engine import app
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html as html_report
from trt_nvfp4.builder.report import inspected
from trt_nvfp4.builder.report.inspected import InspectedModel
from trt_nvfp4.builder.report.inspection import BUILD_RESULT
from trt_nvfp4.builder.targets import find_target


@pytest.fixture
def out(gated_mlps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan, rewritten model and report of a run that stopped before the build, and an engine of unknown origin; made
    once, since the seed is the same for all."""
    made, folder = tmp_path_factory.getbasetemp() / "inspected", gated_mlps.parent / "out"
    if not made.exists():
        target = find_target("rtx-blackwell")
        pipeline.run(pipeline.Request(gated_mlps, target, made / "o.engine", stop_after="rewrite"))
        (made / "o.engine").write_bytes(b"not read")
    return shutil.copytree(made, folder)


@pytest.mark.parametrize(
    ("file", "kind", "texts"),
    [
        ("o.plan.yaml", "plan", ["gated_mlp_", "nvfp4_w4a16", "64-128-64", "rtx-blackwell"]),
        ("o.report.json", "report", ["gated_mlp_", "rtx-blackwell", "smaller"]),
        ("o.rewritten.onnx", "model", [": NVFP4GatedMLP", "x: float16 [tokens, 64]", "trt_nvfp4: 1"]),
        ("o.engine", "engine", ["8 bytes", "of a later run, which built no engine"]),
    ],
)
def test_each_kind_of_file(out: Path, file: str, kind: str, texts: list[str]) -> None:
    shown = invoked(app, [out / file], env={"COLUMNS": "200"})
    for text in texts:
        assert text in shown.stdout
    as_json = CliRunner().invoke(app, [str(out / file), "--json"])
    assert json.loads(as_json.stdout)["kind"] == kind


def test_engine_without_its_report(out: Path) -> None:
    (out / "o.report.json").unlink()
    shown = invoked(app, [out / "o.engine"], env={"COLUMNS": "200"})
    assert "without the target's GPU" in shown.stdout


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("none.yaml", None, "no such file"),
        ("x.txt", "x", "expected a plan"),
        ("x.json", "{", "not JSON"),
        ("x.json", "{}", "not a report"),
        ("x.json", '{"subgraphs": [], "timings_s": {}}', "not a report of this version of build-engine: it lacks acc"),
        ("x.onnx", "x" * 50, "not an ONNX model: it has no nodes"),
        ("folder", "", "expected a folder that build-engine wrote"),
    ],
)
def test_what_cannot_be_inspected(tmp_path: Path, file: str, content: str | None, text: str) -> None:
    path = tmp_path / file
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    shown = CliRunner().invoke(app, [str(path)])
    at_fault = path.suffix == ".onnx" or content is None
    assert shown.exit_code == (errors.MODEL_AT_FAULT if at_fault else errors.USAGE)
    assert text in " ".join(shown.stderr.split())


@pytest.mark.parametrize("key", ["recipe", "budget", "weights_bytes", "files", "subgraphs"])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_report_that_lacks_something(out: Path, key: str, as_json: list[str]) -> None:
    file = out / "o.report.json"
    data = json.loads(file.read_text())
    data[key] = [{"name": "gated_mlp_0"}]
    if key != "subgraphs":
        del data[key]
    file.write_text(json.dumps(data))
    invoked(app, [file, *as_json], errors.USAGE, "not a report of this version of build-engine")


def test_engine_that_a_bundle_built(out: Path) -> None:
    """Its build script knows the engine, and of the plan what it checked."""
    built = {"target": "thor", "backend": "tensorrt", "engine": "o.engine", "engine_bytes": 8, "engine_layers": 5}
    built |= {"engine_sha256": hashlib.sha256((out / "o.engine").read_bytes()).hexdigest()}
    built |= {"plugin_layers": 2, "timings_s": {"build": 1.5}, "warnings": ["slow disk"]}
    built["subgraphs"] = [{"name": "layer0", "realized": "nvfp4 plugin", "problem": None}]
    (out / "o.report.json").write_text(json.dumps(built))
    for file in ("o.engine", "o.report.json"):
        shown = invoked(app, [out / file], env={"COLUMNS": "200"})
        for text in ("thor", "layer0: nvfp4 plugin", "slow disk"):
            assert text in shown.stdout
    as_json = json.loads(CliRunner().invoke(app, [str(out / "o.engine"), "--json"]).stdout)
    assert (as_json["kind"], as_json["plugin_layers"]) == ("engine", 2)
    for another in (b"another", (out / "o.engine").read_bytes()[::-1]):
        (out / "o.engine").write_bytes(another)
        shown = CliRunner().invoke(app, [str(out / "o.engine")], env={"COLUMNS": "200"})
        assert "o.report.json is of another engine (8 bytes)" in shown.stdout
    later = built | {"engine": None, "engine_bytes": None, "engine_sha256": None}
    (out / "o.report.json").write_text(json.dumps(later))
    shown = CliRunner().invoke(app, [str(out / "o.engine")], env={"COLUMNS": "200"})
    assert "o.report.json is of a later run, which built no engine" in shown.stdout


def test_empty_engine(out: Path) -> None:
    (out / "o.engine").write_bytes(b"")
    invoked(app, [out / "o.engine"], errors.MODEL_AT_FAULT, "o.engine: empty, and no engine")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"checksums": None}, "checksums is None, expected dict[str, str]"),
        ({"planned": 5}, "planned is 5, expected list[object]"),
        ({"target": None}, "target is None, expected str"),
        ({"profiles": [{"x": 5}]}, "profiles is [{'x': 5}], expected list[dict[str, list[list[int]]]]"),
        ({"planned": [{"name": "a", "decision": "fp8"}]}, "planned's engine_nodes is None, expected list[str]"),
    ],
    ids=str,
)
def test_bundle_with_a_broken_manifest(tmp_path: Path, changed: dict[str, object], text: str) -> None:
    sound: dict[str, object] = {"target": "ada", "arch": "sm_89", "modules": {}, "profiles": [], "checksums": {}}
    sound |= {"model": "model.onnx", "planned": [], "plugin_library": None, "plugin_sources": None}
    (tmp_path / "manifest.json").write_text(json.dumps(sound | changed))
    invoked(app, [tmp_path], errors.MODEL_AT_FAULT, f"manifest.json: {text}; copy the bundle again")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"files": None}, "files is None, expected dict[str, str]"),
        ({"budget": 5}, "budget is 5, expected object | None"),
        ({"budget": {"budget": 5}}, "budget's budget is 5, expected str"),
        ({"accuracy": {"tensors": [{"name": 5}]}}, "accuracy's tensors's name is 5, expected str"),
        ({"predicted": {"gpu": None}}, "predicted's gpu is None, expected str"),
        ({"recipe": 5}, "recipe is 5, expected str | None"),
        ({"engine": "o.engine"}, "engine_bytes is None, expected int"),
        ({"timings_s": {"read": "x"}}, "timings_s is {'read': 'x'}, expected dict[str, float]"),
        ({"subgraphs": [{"decision": 5}]}, "subgraphs's decision is 5, expected str"),
    ],
    ids=str,
)
def test_report_with_a_value_of_another_type(out: Path, changed: dict[str, Any], text: str) -> None:
    file = out / "o.report.json"
    data = json.loads(file.read_text())
    if "subgraphs" in changed:
        changed = {"subgraphs": [data["subgraphs"][0] | changed["subgraphs"][0]]}
    file.write_text(json.dumps(data | changed))
    invoked(app, [file], errors.USAGE, f"its {text}; build again")


def test_report_of_a_build_script_with_broken_subgraphs(tmp_path: Path) -> None:
    (file := tmp_path / "o.report.json").write_text(json.dumps(dict.fromkeys(BUILD_RESULT, 5)))
    invoked(app, [file], errors.USAGE)


@pytest.mark.parametrize(("name", "code"), [("x.json", errors.USAGE), ("x.yaml", errors.USAGE), ("manifest.json", 3)])
def test_deep_nesting(tmp_path: Path, name: str, code: int) -> None:
    (file := tmp_path / name).write_text("[" * 100_000)
    invoked(app, [tmp_path if name == "manifest.json" else file], code, f"{name}: no")


def test_types_of_inputs_and_outputs(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[?, n, 8] x) => (seq(float[n, 8]) y, float z) {
            y = SequenceConstruct(x, x)
            z = ReduceMax<keepdims = 0>(x)
        }""")
    onnx.save(model, tmp_path / "m.onnx")
    shown = CliRunner().invoke(app, [str(tmp_path / "m.onnx"), "--json"])
    found = json.loads(shown.stdout)
    assert found["inputs"] == {"x": "float [?, n, 8]"}
    assert found["outputs"] == {"y": "sequence", "z": "float []"}


def test_what_a_budget_came_to_is_on_its_side_of_the_limit(out: Path) -> None:
    data = json.loads((out / "o.report.json").read_text())
    data["budget"] = {
        "budget": "cosine>=0.99123441",
        "metric": "cosine",
        "achieved": 0.99123449,
        "worst_output": "y",
        "held_out_samples": 3,
        "choosing_samples": 5,
        "predicted_loss": None,
        "roofline_us": 1.0,
        "subgraphs": {},
        "tried": [],
    }
    (out / "o.report.json").write_text(json.dumps(data))
    shown = CliRunner().invoke(app, [str(out / "o.report.json")])
    line = "cosine>=0.99123441: 0.9912345 on 3 held-out samples, roofline 1 us"
    assert line in " ".join(shown.stdout.split())
    assert f"Budget {html.escape(line)}." in html_report.write(out / "o.report.json").read_text()


def test_linears_that_were_refused_are_not_offered_again(out: Path) -> None:
    """A router's, and what --exclude names. What is offered to the others leaves MLPs and MoE blocks replaced."""
    data = json.loads((out / "o.report.json").read_text())
    reason, others = "it belongs to a router: rounding its weights", "--kinds names mlp, not linear"
    for entry, why in zip(data["subgraphs"], (reason, others), strict=True):
        code = "feeds_a_choice" if why is reason else "kind_not_selected"
        entry |= {"kind": "linear", "decision": "keep", "reason": why, "reason_code": code}
    for subgraphs, counted in ((data["subgraphs"], 1), (data["subgraphs"][:1], 0)):
        (out / "o.report.json").write_text(json.dumps(data | {"subgraphs": subgraphs}))
        shown = " ".join(CliRunner().invoke(app, [str(out / "o.report.json")]).stdout.split())
        page = html_report.write(out / "o.report.json").read_text()
        assert reason in shown
        assert ("linears outside of MLPs" in page) == bool(counted)
        for text in (shown, re.sub("<.*?>", "", page)):
            assert ("--kinds moe,gated_mlp,mlp,linear replaces those that can be" in text) == bool(counted)


def test_what_layers_have_alike_is_one_line() -> None:
    """A language model of 36 layers has 144 inputs and outputs that are caches."""
    caches = {f"past_key_values.{layer}.{part}": "bfloat16" for layer in range(3) for part in ("key", "value")}
    found = InspectedModel({"": 24}, {"input_ids": "int64", **caches}, {}, {}, {})
    (table,) = inspected.tables(found)
    (lines,) = (cells for cells in table.columns[1].cells if "input_ids" in str(cells))
    assert str(lines).split("\n") == [
        "input_ids: int64",
        "past_key_values.{0-2}.key: bfloat16",
        "past_key_values.{0-2}.value: bfloat16",
    ]
