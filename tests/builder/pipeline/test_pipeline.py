"""From ONNX or a Hugging Face directory to a verified engine, by TensorRT-RTX for SM120 on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import yaml
from onnx import TensorProto, helper
from planned_nodes import planned_nodes
from rich.filesize import decimal

from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.errors import BuilderError, BuildFailedError, UsageError, VerificationError
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.pipeline import build_step, pipeline, read_step
from trt_nvfp4.builder.report.inspection import inspect
from trt_nvfp4.builder.report.report import load, summary_table
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt.verify import PlannedNodes
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.planning.plan import Plan

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")

STAGES = ["read", "plan", "calibrate", "rewrite", "compare", "compile", "build"]


class Recorded:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, done: int, total: int, text: str = "") -> None:
        self.steps.append((done, total))


def run(model: Path, **options: Any) -> dict[str, Any]:
    options = {"target": find_target("rtx-blackwell"), "output": model.parent / "out" / "o.engine", **options}
    report: dict[str, Any] = json.loads(pipeline.run(pipeline.Request(model=model, **options), Recorded()).json())
    return report


@pytest.fixture
def samples(tmp_path: Path, rng: np.random.Generator) -> Path:
    folder = tmp_path / "samples"
    folder.mkdir()
    for index in range(3):
        np.savez(folder / f"{index}.npz", x=rng.standard_normal((5, 64)).astype(np.float16))
    return folder


def test_without_data_what_a_plan_quantizes_is_said(gated_mlps: Path, samples: Path) -> None:
    assert "activations are not quantized" in run(gated_mlps, stop_after="rewrite")["warnings"][0]
    plan = Path(run(gated_mlps, calib_data=samples, stop_after="plan")["files"]["plan"])
    report = run(gated_mlps, plan=plan, stop_after="rewrite")
    assert {entry["decision"] for entry in report["subgraphs"]} == {"nvfp4_w4a4"}
    assert "quantized activations are scaled at run time" in report["warnings"][0]
    assert not run(gated_mlps, precision="bf16", stop_after="rewrite")["warnings"], "data would change nothing"
    for name, said in (("h200", "quantized activations are scaled at run time"), ("ada", "are not quantized")):
        report = run(gated_mlps, target=find_target(name), precision="fp8", stop_after="rewrite")
        assert said in report["warnings"][-1], "the plugin finds scales, Q/DQ nodes do not"


def test_fp8_beyond_decoding(gated_mlps: Path, samples: Path) -> None:
    """On a target without FP4, by the opt shapes, unless NVFP4 is asked for."""

    def planned(tokens: int, **options: Any) -> set[str]:
        options = {"target": find_target("h200"), "calib_data": samples, "stop_after": "plan"} | options
        report = run(gated_mlps, opt_shapes={"x": (tokens, 64)}, max_shapes={"x": (64, 64)}, **options)
        return {entry["decision"] for entry in report["subgraphs"]}

    assert planned(32) == {"nvfp4_w4a16"}
    assert planned(33) == {"fp8"}
    assert planned(33, require="nvfp4") == planned(33, precision="nvfp4") == {"nvfp4_w4a16"}
    assert planned(33, target=find_target("thor")) == {"nvfp4_w4a4"}


@pytest.mark.parametrize("given", ["max_shapes", "min_shapes", "longest"])
@pytest.mark.parametrize("budget", [None, Budget.parse("cosine>=0.9")])
def test_the_plan_is_for_the_shapes_that_the_engine_is_tuned_for(
    gated_mlps: Path, samples: Path, monkeypatch: pytest.MonkeyPatch, given: str, budget: Budget | None
) -> None:
    """Without --opt-shapes, too; rows are counted once."""
    tokens = {"max_shapes": 16, "min_shapes": 200, "longest": 32}[given]
    if given == "longest":
        monkeypatch.setattr(read_step.export, "longest_sequence", lambda *_: tokens)
    counted = []

    def count(*arguments: Any) -> dict[str, int]:
        counted.append(subgraph_tokens(*arguments))
        return counted[-1]

    monkeypatch.setattr(pipeline, "subgraph_tokens", count)
    shapes = {} if given == "longest" else {given: {"x": (tokens, 64)}}
    options: dict[str, Any] = {"calib_data": samples, "accuracy_budget": budget, "stop_after": "plan"} | shapes
    report = run(gated_mlps, target=find_target("h200"), **options)
    assert report["profiles"]["x"][1] == [tokens, 64]
    assert [entry["tokens"] for entry in report["predicted"]["subgraphs"]] == [tokens] * 2
    if budget is None:
        assert {entry["decision"] for entry in report["subgraphs"]} == {
            "fp8" if given == "min_shapes" else "nvfp4_w4a16"
        }
    run(gated_mlps, target=find_target("h200"), plan=Path(report["files"]["plan"]), stop_after="plan", **shapes)
    assert [list(rows.values()) for rows in counted] == [[tokens] * 2] * 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_accuracy_is_of_as_many_samples_as_asked_for(gated_mlps: Path, samples: Path, count: int) -> None:
    report = run(gated_mlps, calib_data=samples, accuracy_samples=count, stop_after="rewrite")
    assert report["accuracy"].get("samples", 0) == count
    assert ("not_measured" in report["accuracy"]) == (count == 0)


def test_little_memory_is_warned_of(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for the weights, so that the build is tried."""
    free = psutil.virtual_memory()._replace(available=10**8)
    monkeypatch.setattr("trt_nvfp4.builder.tensorrt.build_process.psutil.virtual_memory", lambda: free)
    report = run(gated_mlps, precision="bf16")
    assert [text for text in report["warnings"] if "may need" in text and "100.0 MB are free" in text]


def test_timings_are_kept(gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `tensorrt` adds on its GPU, which the script stands for."""
    result = {"backend": "tensorrt", "engine_bytes": 6, "engine_sha256": "", "plugin_layers": 0, "caches_in_place": 0}
    result |= {"plugin_library": None, "float32_products": [], "weights": None}
    result |= {"subgraphs": [], "versions": {}, "warnings": [], "peak_rss_bytes": 0}

    def script(folder: Path, engine: Path, *_: Any) -> dict[str, Any]:
        engine.write_bytes(b"engine")
        (folder / "timing.cache").write_bytes((folder / "timing.cache").read_bytes() + b" and more")
        return result

    monkeypatch.setattr(build_step.engine, "run_script", script)
    (tmp_path / "mine.cache").write_bytes(b"timings")
    run(gated_mlps, precision="bf16", timing_cache=tmp_path / "mine.cache")
    assert (tmp_path / "mine.cache").read_bytes() == b"timings and more"


def test_a_timing_cache_in_a_folder_that_is_not_there(gated_mlps: Path, tmp_path: Path) -> None:
    """Known before the build; made for it, and gone with nothing in it."""
    cache = tmp_path / "none" / "mine.cache"
    assert run(gated_mlps, precision="bf16", timing_cache=cache)["engine_bytes"]
    assert not cache.parent.exists()
    cache.parent.write_text("")
    with pytest.raises(FileExistsError):
        run(gated_mlps, precision="bf16", timing_cache=cache)


def test_the_plugin_library_beside_the_engine(gated_mlps: Path) -> None:
    report = run(gated_mlps, embed_plugins=False)
    library = gated_mlps.parent / "out" / report["plugin_library"]
    assert report["plugin_library_bytes"] is None
    assert report["files"]["plugin library"] == str(library)
    assert report["engine_bytes"] < 1e6 < library.stat().st_size
    assert report["plugin_layers"] == 2
    assert inspect(Path(report["engine"])).report.plugin_library == library.name


def test_engine_and_report(gated_mlps: Path, samples: Path) -> None:
    progress = Recorded()
    output = gated_mlps.parent / "out" / "o.engine"
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, output, calib_data=samples, require="nvfp4"), progress)
    report = json.loads((gated_mlps.parent / "out" / "o.report.json").read_text())
    assert report["target"] == "rtx-blackwell"
    assert report["backend"] == "tensorrt_rtx"
    assert output.stat().st_size == report["engine_bytes"] > report["plugin_library_bytes"] > 1e6
    carried = decimal(report["plugin_library_bytes"])
    shown = " ".join(
        str(cell) for column in summary_table(load(output.with_name("o.report.json"))).columns for cell in column.cells
    )
    assert f"of which plugin library {carried}), verified" in shown
    assert f"{carried} of the engine are the plugin library." in output.with_name("o.report.html").read_text()
    assert len(report["subgraphs"]) == report["plugin_layers"] == 2
    for subgraph in report["subgraphs"]:
        assert subgraph["kind"] == "gated_mlp"
        assert subgraph["decision"] == "nvfp4_w4a4"
        assert subgraph["realized"] == "nvfp4 plugin"
        assert subgraph["activations"] == "NVFP4, calibrated scales"
        assert subgraph["reason"]
        assert subgraph["nodes"]
        assert subgraph["shapes"]["intermediate_features"] == 128
    # 2 bytes per weight become half a byte and a sixteenth of one.
    assert report["weights_bytes"]["before"] > 3 * report["weights_bytes"]["after"] > 0
    assert list(report["timings_s"]) == STAGES
    assert report["peak_rss_bytes"] > 100 << 20
    assert {"tensorrt_rtx", "onnx", "python"} <= report["versions"].keys()
    assert [done for done, _ in progress.steps[:3]] == [1, 2, 3], "one step per sample"
    assert progress.stages[-1] == "checking the engine"
    assert inspect(output).report.subgraphs == report["subgraphs"]


def test_what_the_plan_has_no_entry_for(gated_mlps: Path) -> None:
    """As the plan is, also where entries were taken out of it; with the linears that stay, it adds up to the model."""
    planned = run(gated_mlps, stop_after="plan")
    assert planned["unplanned"] == {}
    plan = Path(planned["files"]["plan"])
    values = yaml.safe_load(plan.read_text())
    del values["subgraphs"][0]
    plan.write_text(yaml.safe_dump(values))
    found = run(gated_mlps, plan=plan, stop_after="rewrite")["unplanned"]
    assert found == {"MatMul": {"count": 3, "weight_bytes": 3 * 64 * 128 * 2, "share": 0.5}}


def test_samples_that_no_decision_uses(gated_mlps: Path, samples: Path) -> None:
    report = run(gated_mlps, precision="bf16", calib_data=samples, stop_after="rewrite")
    assert {entry["decision"] for entry in report["subgraphs"]} == {"keep"}
    assert any("is not read" in warning for warning in report["warnings"])
    # The next command finds a file nevertheless.
    report = run(gated_mlps, precision="bf16", calib_data=samples, stop_after="calibrate")
    assert any("is not read" in warning for warning in report["warnings"])
    run(gated_mlps, precision="bf16", calib_data=Path(report["files"]["statistics"]), stop_after="rewrite")


def test_every_arrow_can_be_stopped_at_and_gone_on_from(gated_mlps: Path, samples: Path) -> None:
    out = gated_mlps.parent / "out"
    run(gated_mlps, calib_data=samples, stop_after="plan")
    assert sorted(file.name for file in out.iterdir()) == ["o.plan.yaml", "o.report.html", "o.report.json"]

    plan = yaml.safe_load((out / "o.plan.yaml").read_text())
    plan["subgraphs"][1]["decision"] = "fp16"
    (out / "edited.yaml").write_text(yaml.safe_dump(plan))
    run(gated_mlps, calib_data=samples, plan=out / "edited.yaml", stop_after="calibrate")
    assert not (out / "o.rewritten.onnx").exists()

    run(gated_mlps, calib_data=out / "o.statistics.json", plan=out / "edited.yaml", stop_after="rewrite")
    assert (out / "o.rewritten.onnx").exists()
    assert not (out / "o.engine").exists()

    report = run(gated_mlps, calib_data=out / "o.statistics.json", plan=out / "edited.yaml")
    assert [entry["realized"] for entry in report["subgraphs"]] == ["nvfp4 plugin", "fp16"]
    assert report["plugin_layers"] == 1

    (out / "o.engine").unlink()
    resumed = run(out / "o.rewritten.onnx", plan=out / "edited.yaml", output=out / "o.engine")
    assert [entry["realized"] for entry in resumed["subgraphs"]] == ["nvfp4 plugin", "fp16"]
    assert [entry["activations"] for entry in resumed["subgraphs"]] == ["NVFP4, calibrated scales", "as in the model"]
    assert (out / "o.engine").stat().st_size == resumed["engine_bytes"]


def test_a_plan_that_is_handed_back_stays_as_it_was_edited(gated_mlps: Path) -> None:
    plan = Path(run(gated_mlps, stop_after="plan")["files"]["plan"])
    edited = plan.read_text().replace("decision: nvfp4_w4a16", "decision: fp16  # too coarse in 4 bits", 1)
    plan.write_text(edited)
    (link := gated_mlps.parent / "link.yaml").symlink_to(plan)
    for given in (plan, link):
        report = run(gated_mlps, plan=given, stop_after="rewrite")
        assert [entry["decision"] for entry in report["subgraphs"]] == ["fp16", "nvfp4_w4a16"]
        assert report["subgraphs"][0]["reason"].startswith("edited; nvfp4_w4a16 was planned")
        assert plan.read_text() == edited
    elsewhere = run(gated_mlps, plan=plan, output=gated_mlps.parent / "other.engine", stop_after="plan")
    assert Plan.load(elsewhere["files"]["plan"]).subgraphs[0].decision == "fp16"
    # The rewritten model is checked against the recipe, too.
    run(gated_mlps, plan=plan, recipe="mse", stop_after="rewrite")
    assert Plan.load(plan).recipe == "mse"


def test_statistics_of_another_model(
    gated_mlps: Path, samples: Path, save_gated_mlps: Callable[..., Path], tmp_path: Path
) -> None:
    """Whose tensors have the same names."""
    run(gated_mlps, calib_data=samples, stop_after="calibrate")
    (tmp_path / "other").mkdir()
    other = save_gated_mlps(tmp_path / "other" / "model.onnx")
    statistics = gated_mlps.parent / "out" / "o.statistics.json"
    with pytest.raises(CalibrationError, match=r"o\.statistics\.json: .* another model than .*other"):
        run(other, calib_data=statistics, stop_after="rewrite")


@pytest.mark.parametrize("data", ["NaN", "of another model", "without Hessians"])
def test_bad_data_leaves_the_plan_of_the_engine(gated_mlps: Path, samples: Path, data: str) -> None:
    run(gated_mlps, calib_data=samples, precision="fp8", stop_after="rewrite")
    statistics = gated_mlps.parent / "out" / "o.statistics.json"
    if data == "NaN":
        np.savez(samples / "0.npz", x=np.full((5, 64), np.nan, np.float16))
    elif data == "of another model":
        content = json.loads(statistics.read_text())
        statistics.write_text(json.dumps(content | {"model": "another"}))
    before = {file: file.read_bytes() for file in statistics.parent.iterdir()}
    recipe = "gptq" if data == "without Hessians" else None
    with pytest.raises(CalibrationError):
        run(gated_mlps, calib_data=samples if data == "NaN" else statistics, recipe=recipe, stop_after="rewrite")
    assert {file: file.read_bytes() for file in statistics.parent.iterdir()} == before


def test_rewritten_model_needs_its_plan(gated_mlps: Path) -> None:
    run(gated_mlps, stop_after="rewrite")
    with pytest.raises(UsageError, match="has been rewritten already; add --plan"):
        run(gated_mlps.parent / "out" / "o.rewritten.onnx")


@pytest.mark.parametrize("calibrated", [True, False])
def test_fp8_is_found_in_the_engine(gated_mlps: Path, samples: Path, calibrated: bool) -> None:
    report = run(gated_mlps, precision="fp8", require="fp8", calib_data=samples if calibrated else None)
    assert [(entry["decision"], entry["realized"]) for entry in report["subgraphs"]] == [("fp8", "fp8")] * 2


def test_require_refuses_what_the_plan_lowers(gated_mlps: Path) -> None:
    with pytest.raises(VerificationError, match="--require nvfp4 cannot be met"):
        run(gated_mlps, precision="fp8", require="nvfp4")
    assert not (gated_mlps.parent / "out" / "o.plan.yaml").exists()
    plan = Path(run(gated_mlps, precision="fp8", stop_after="rewrite")["files"]["plan"])
    with pytest.raises(BuilderError, match="--require nvfp4 cannot be met"):
        run(gated_mlps.parent / "out" / "o.rewritten.onnx", plan=plan, require="nvfp4")


def test_require_is_about_what_was_selected(gated_mlps: Path) -> None:
    names = [entry.name for entry in plan_of(gated_mlps).subgraphs]
    report = run(gated_mlps, exclude=f"^{names[1]}$", require="nvfp4")
    assert [entry["realized"] for entry in report["subgraphs"]] == ["nvfp4 plugin", "as in the model"]
    plan = gated_mlps.parent / "out" / "o.plan.yaml"
    with pytest.raises(BuilderError, match="no subgraph at all"):
        run(gated_mlps, plan=plan, include="matches nothing", require="nvfp4")


def test_linears_of_an_mlp_that_is_refused_are_enough(gated_mlps: Path) -> None:
    """Its hidden values are an output too, so that its linears are replaced one by one, if all are."""
    model = onnx.load(gated_mlps)
    model.graph.output.append(helper.make_tensor_value_info("h1", TensorProto.FLOAT16, ["tokens", 128]))
    onnx.save(model, gated_mlps)
    options: dict[str, Any] = {"require": "nvfp4", "stop_after": "plan"}
    report = run(gated_mlps, kinds=("gated_mlp", "linear"), **options)
    plan = Plan.load(report["files"]["plan"])
    decisions = {(entry.kind, entry.decision) for entry in plan.subgraphs}
    assert decisions == {("gated_mlp", "nvfp4_w4a16"), ("gated_mlp", "keep"), ("linear", "nvfp4_w4a16")}
    with pytest.raises(BuilderError, match=r"cannot be met: .*: keep \(an intermediate is used elsewhere"):
        run(gated_mlps, kinds=("gated_mlp",), **options)
    next(entry for entry in plan.subgraphs if entry.kind == "linear").decision = "keep"
    plan.save(edited := gated_mlps.parent / "edited.yaml")
    with pytest.raises(BuilderError, match=r"cannot be met: .*: keep \(an intermediate is used elsewhere"):
        run(gated_mlps, kinds=("gated_mlp",), plan=edited, require="nvfp4")


def plan_of(model: Path) -> Plan:
    run(model, stop_after="plan")
    return Plan.load(model.parent / "out" / "o.plan.yaml")


def test_engine_of_an_earlier_run_stays_when_a_build_fails(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(gated_mlps)
    before = (gated_mlps.parent / "out" / "o.engine").read_bytes()

    def nothing_carries(*arguments: Any) -> list[PlannedNodes]:
        return [planned_nodes("gated_mlp_0", "nvfp4", "not there")]

    monkeypatch.setattr(build_step.bundle, "planned_nodes", nothing_carries)
    with pytest.raises(VerificationError, match="the engine is not what was planned"):
        run(gated_mlps)
    assert (gated_mlps.parent / "out" / "o.engine").read_bytes() == before


def test_a_damaged_library_is_named_where_it_lies(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in the folder of the build, which is gone by then."""
    damaged = tmp_path / "cache" / "libdamaged.so"
    damaged.parent.mkdir()
    damaged.write_bytes(b"\x7fELF")
    monkeypatch.setattr(build_step, "build_library", lambda *_, **__: damaged)
    with pytest.raises(BuildFailedError, match=rf"^{damaged}: TensorRT could not load .*in the cache, delete it"):
        run(gated_mlps)
