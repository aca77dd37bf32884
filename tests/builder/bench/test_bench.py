"""bench-engine: which mode runs, and what it predicts and times on a GPU that tests stand in for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_stand_ins import CpuDevice, Recorded, planned, request
from reference_host import ReferenceHost
from rich.console import Console

from trt_nvfp4.builder.bench import bench
from trt_nvfp4.builder.bench import subgraphs as subgraph_bench
from trt_nvfp4.builder.bench.result import tables
from trt_nvfp4.builder.bench.subject import Request, subject_of
from trt_nvfp4.builder.bench.timing import CudaDevice
from trt_nvfp4.builder.bench.variants import sample_of
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import UnavailableError, UsageError, VerificationError
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan


def test_without_a_gpu_it_predicts(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: None)
    result = bench.bench(request(gated_mlps, shapes={"x": (16, 64)}), Recorded())
    assert result.mode == "roofline"
    assert result.label.startswith("predicted")
    assert "no NVIDIA GPU" in result.notes[0]
    # Three 64 x 128 matrices, 16 rows in and out of 64 values, two layers; 1.792 TB/s.
    for name, bytes_per_weight in (("nvfp4", 0.5625), ("fp8", 1), ("bf16", 2)):
        expected = 2 * (3 * 64 * 128 * bytes_per_weight + 16 * 128 * 2) / 1.792e12 * 1e6
        assert result.contestants[name] == {"predicted_us": pytest.approx(expected)}
    assert all("median_us" not in entry for entry in result.subgraphs)
    times = {name: entry["predicted_us"] for name, entry in result.contestants.items()}
    speed_ups = [f"{times[name] / times['nvfp4']:.2f}x" for name in ("fp8", "bf16")]
    assert list(tables(result)[0].columns[-1].cells) == ["-", *speed_ups]


def test_tables_name_what_was_planned_whatever_it_is(
    gated_mlps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: None)
    plan = Plan.load(planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision = "fp8"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    result = bench.bench(request(gated_mlps, plan=edited, shapes={"x": (16, 64)}), Recorded())
    assert "the replaced subgraphs" in result.label
    whole, parts = tables(result)
    Console(width=120).print(whole, parts)
    shown = capsys.readouterr().out
    assert "as planned" in shown
    assert "nvfp4" not in shown.lower()
    # FP8 weights of three 64 x 128 matrices, 16 rows in and out of 64 values; 1.792 TB/s: 0.016 us, not 0.02.
    assert "0.016 " in shown


def test_nothing_to_predict_says_why(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: None)
    plan = Plan.load(planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision, entry.reason = "keep", "its user wants it so"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    expected = r"nothing to predict \(gated_mlp 'gated_mlp_0' is keep: its user wants it so\)"
    with pytest.raises(UsageError, match=expected):
        bench.bench(request(gated_mlps, plan=edited), Recorded())


def test_samples_say_the_shapes_and_shapes_overrule_them(gated_mlps: Path, rng: np.random.Generator) -> None:
    samples = gated_mlps.with_name("s.npz")
    np.savez(samples, x=rng.standard_normal((7, 64)).astype(np.float16))
    for shapes, rows in (({}, 7), ({"x": (7, 64)}, 7), ({"x": (9, 64)}, 9)):
        asked = request(gated_mlps, mode="roofline", calib_data=samples, shapes=shapes)
        assert [entry["tokens"] for entry in bench.bench(asked, Recorded()).subgraphs] == [rows, rows]
        sample = sample_of(asked, subject_of(asked, CpuDevice))
        assert sample["x"].shape == (rows, 64)
        assert np.array_equal(sample["x"], np.load(samples)["x"]) == (rows == 7)


@pytest.mark.parametrize("by", ["shapes", "sample", "default"])
def test_a_new_plan_is_that_of_a_build(gated_mlps: Path, by: str, rng: np.random.Generator) -> None:
    """Of the same weights and for as many tokens: FP8 beyond some, on a GPU without FP4."""
    samples = gated_mlps.with_name("s.npz")
    decided = []
    for rows in (16, 256):
        np.savez(samples, x=rng.standard_normal((rows, 64)).astype(np.float16))
        data = samples if by == "sample" else None
        shapes = {"x": (rows, 64)} if by == "shapes" else {}
        opt_shapes = {} if by == "default" else {"x": (rows, 64)}
        build = pipeline.Request(
            gated_mlps,
            find_target("h200"),
            gated_mlps.with_name("o"),
            stop_after="plan",
            calib_data=data,
            opt_shapes=opt_shapes,
        )
        pipeline.run(build, Recorded())
        expected = Plan.load(build.file(".plan.yaml"))
        found = subject_of(request(gated_mlps, target="h200", calib_data=data, shapes=shapes), CpuDevice).plan
        found.save(saved := gated_mlps.with_name("found.plan.yaml"))
        assert saved.read_text() == build.file(".plan.yaml").read_text()
        decided.append(expected.subgraphs[0].decision)
    assert decided == (["fp8", "fp8"] if by == "default" else ["nvfp4_w4a16", "fp8"])


@pytest.mark.parametrize(
    ("gpu", "target"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H20", "h200")]
)
def test_gpus_alike_are_told_apart_by_name(
    gated_mlps: Path, gpu: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(CpuDevice, "gpu", gpu)
    result = bench.bench(request(gated_mlps, target=None, mode="roofline"), Recorded(), CpuDevice)
    assert result.target == target


@pytest.mark.parametrize("mode", ["engine", "plugins"])
def test_a_mode_that_cannot_run_is_an_error(gated_mlps: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: None)
    with pytest.raises(UnavailableError, match=f"--mode {mode} for rtx-blackwell cannot run here: .*no NVIDIA"):
        bench.bench(request(gated_mlps, mode=mode), Recorded())


def test_on_another_gpu_it_times_the_plugins(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
    arches, host = [], ReferenceHost()

    def open_host(arch: str) -> ReferenceHost:
        arches.append(arch)
        return host

    result = bench.bench(request(gated_mlps, shapes={"x": (16, 64)}), Recorded(), CpuDevice, open_host)
    assert result.mode == "plugins"
    assert "plugin host" in result.label
    assert "this machine's GPU has compute capability 9.0, rtx-blackwell has 12.0" in result.notes[0]
    assert arches == ["sm_90a"]
    assert host.calls > 0
    (group,) = result.subgraphs
    assert group["names"] == ["gated_mlp_0", "gated_mlp_1"], "equal subgraphs are timed once"
    assert group["tokens"] == 16
    assert {"nvfp4", "bf16"} <= group["timings"].keys()
    assert group["timings"].keys() | group["missing"].keys() == {"nvfp4", "bf16", "fp8"}
    # The whole is the sum over both.
    assert result.contestants["bf16"]["median_us"] == pytest.approx(2 * group["timings"]["bf16"]["median_us"])
    assert result.environment["before"]["driver"] == "0"
    assert tables(result)


def test_what_the_sums_leave_out_is_said(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("this GPU has no FP8\nand more")

    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(subgraph_bench, "_fp8", refuse)
    plan = Plan.load(planned(gated_mlps))
    plan.subgraphs[1].decision = "bf16"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    asked = request(gated_mlps, plan=edited)
    result = bench.bench(asked, Recorded(), CpuDevice, lambda arch: ReferenceHost())
    assert list(result.contestants) == ["nvfp4", "bf16"]
    assert result.notes[1:] == [
        "not timed, as only dense NVFP4 subgraphs are: gated_mlp_1",
        "no fp8 baseline of gated_mlp_0: this GPU has no FP8",
    ]


def test_a_wrong_plugin_is_not_timed(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
    with pytest.raises(VerificationError, match="relative error"):
        bench.bench(request(gated_mlps), Recorded(), CpuDevice, lambda arch: ReferenceHost(wrong=1.2))


@pytest.mark.parametrize(
    ("profiles", "tokens"),
    [({"x": [[1, 64], [48, 64], [96, 64]]}, 48), ({"x": 3}, 128), ([1], 128), ({"x": [["a"], ["a"], ["a"]]}, 128)],
)
def test_an_engine_is_predicted_at_its_opt_shapes(gated_mlps: Path, profiles: Any, tokens: int) -> None:
    """By the report beside it, if that is one."""
    engine = planned(gated_mlps).with_name("o.engine")
    engine.write_bytes(b"an engine that is not run")
    report = json.loads(engine.with_suffix(".report.json").read_text())
    engine.with_suffix(".report.json").write_text(json.dumps(report | {"profiles": profiles}))
    result = bench.bench(request(engine, target=None, mode="roofline"), Recorded(), CpuDevice)
    assert {entry["tokens"] for entry in result.subgraphs} == {tokens}


@pytest.mark.gpu
def test_plugins_on_this_gpu(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", hidden=256, intermediate=512)
    few = {"x": (4, 256)}  # of more tokens the plan for this target is FP8
    asked = Request(model, mode="plugins", target="h200", shapes=few, rounds=5)
    result = bench.bench(asked, Recorded(), CudaDevice)
    assert 0 < result.contestants["nvfp4"]["median_us"] < 1e4
    assert 0 < result.contestants["bf16"]["median_us"] < 1e4
