"""bench-engine: which mode runs, how contestants take turns, and its paths on a GPU that tests stand in for."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from reference_host import ReferenceHost
from rich.console import Console
from typer.testing import CliRunner

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.accuracy.runners import session
from trt_nvfp4.builder.bench import bench
from trt_nvfp4.builder.bench import engines as engine_bench
from trt_nvfp4.builder.bench import subgraphs as subgraph_bench
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, Work, interleave
from trt_nvfp4.builder.cli.bench_engine import app
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import backend
from trt_nvfp4.graph_passes.planning.plan import Plan


class Recorded:
    """A Progress that keeps its stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, done: int, total: int, text: str = "") -> None:
        assert done >= 0


class CpuDevice:
    """Stands for a GPU: runs the work, and says that each run took one second more than the one before."""

    name = "cpu"
    gpu = "a test"

    def __init__(self) -> None:
        self.clock = 0

    def capture(self, work: Work) -> Work:
        work()
        return work

    def seconds(self, replay: Work) -> float:
        replay()
        self.clock += 1
        return float(self.clock)

    def stream(self) -> int:
        return 0

    def environment(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "driver": "0", "sm_clock": "1 MHz", "l2_bytes": 1 << 10}


def test_percentiles() -> None:
    timing = Timing.of([float(x) for x in range(1, 101)])
    assert [timing.median_us, timing.p90_us, timing.p99_us] == pytest.approx([50.5, 90.1, 99.01])
    assert [timing.lower_quartile_us, timing.upper_quartile_us] == [25.75, 75.25]
    assert timing.rounds == 100
    assert timing.drift == 75.5 / 25.5


def test_contestants_go_there_and_back() -> None:
    order: list[str] = []

    def contestant(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    device = CpuDevice()
    timings = interleave(device, {name: contestant(name) for name in "abc"}, rounds=2, warm_up=1, calls={"b": 2})
    assert "".join(order) == "abc" + "abc" + "cba" + "abc", "one run to capture, one round to warm up, two timed"
    # Runs 6 and 7 are a's; b's, 5 and 8, hold two calls each.
    assert timings["a"].median_us == pytest.approx((6 + 7) / 2 * 1e6)
    assert timings["b"].median_us == pytest.approx((5 + 8) / 2 / 2 * 1e6)
    assert all(timing.rounds == 2 for timing in timings.values())


def request(model: Path, **options: Any) -> bench.Request:
    return bench.Request(model, **{"target": "rtx-blackwell", "rounds": 2, "warm_up": 0, **options})


def test_without_a_gpu_it_predicts(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: None)
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
    assert list(bench.tables(result)[0].columns[-1].cells) == ["-", *speed_ups]


def test_tables_name_what_was_planned_whatever_it_is(
    gated_mlps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: None)
    plan = Plan.load(_planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision = "fp8"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    result = bench.bench(request(gated_mlps, plan=edited, shapes={"x": (16, 64)}), Recorded())
    assert "the replaced subgraphs" in result.label
    whole, parts = bench.tables(result)
    Console(width=120).print(whole, parts)
    shown = capsys.readouterr().out
    assert "as planned" in shown
    assert "nvfp4" not in shown.lower()
    # FP8 weights of three 64 x 128 matrices, 16 rows in and out of 64 values; 1.792 TB/s: 0.016 us, not 0.02.
    assert "0.016 " in shown


def test_nothing_to_predict_says_why(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: None)
    plan = Plan.load(_planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision, entry.reason = "keep", "its user wants it so"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    expected = r"nothing to predict \(gated_mlp 'gated_mlp_0' is keep: its user wants it so\)"
    with pytest.raises(BuilderError, match=expected):
        bench.bench(request(gated_mlps, plan=edited), Recorded())


def test_samples_say_the_shapes_and_shapes_overrule_them(gated_mlps: Path, rng: np.random.Generator) -> None:
    samples = gated_mlps.with_name("s.npz")
    np.savez(samples, x=rng.standard_normal((7, 64)).astype(np.float16))
    for shapes, rows in (({}, 7), ({"x": (7, 64)}, 7), ({"x": (9, 64)}, 9)):
        asked = request(gated_mlps, mode="roofline", calib_data=samples, shapes=shapes)
        assert [entry["tokens"] for entry in bench.bench(asked, Recorded()).subgraphs] == [rows, rows]
        sample = bench._sample(asked, bench._subject(asked, CpuDevice))
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
        typical = {} if by == "default" else {"x": (rows, 64)}
        build = pipeline.Request(
            gated_mlps,
            find_target("h200"),
            gated_mlps.with_name("o"),
            stop_after="plan",
            calib_data=data,
            typical=typical,
        )
        pipeline.run(build, Recorded())
        expected = Plan.load(build.file(".plan.yaml"))
        found = bench._subject(request(gated_mlps, target="h200", calib_data=data, shapes=shapes), CpuDevice).plan
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
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(CpuDevice, "gpu", gpu)
    result = bench.bench(request(gated_mlps, target=None, mode="roofline"), Recorded(), CpuDevice)
    assert result.target == target


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_nothing_replaced_is_nothing_to_predict(gated_mlps: Path, as_json: list[str]) -> None:
    plan = Plan.load(_planned(gated_mlps))
    for entry in plan.subgraphs:
        entry.decision = "keep"
    plan.save(gated_mlps.with_name("kept.yaml"))
    arguments = [str(gated_mlps), "--mode", "roofline", "--plan", str(gated_mlps.with_name("kept.yaml"))]
    shown = CliRunner().invoke(app, [*arguments, *as_json])
    assert shown.exit_code == errors.USAGE
    assert "the plan replaces no subgraph for rtx-blackwell" in shown.stderr


def _planned(model: Path) -> Path:
    """OUT.plan.yaml of a run that stopped there."""
    engine = model.parent / "out" / "o.engine"
    pipeline.run(pipeline.Request(model, find_target("rtx-blackwell"), engine, stop_after="plan"), Recorded())
    return engine.with_suffix(".plan.yaml")


@pytest.mark.parametrize("mode", ["engine", "plugins"])
def test_a_mode_that_cannot_run_is_an_error(gated_mlps: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: None)
    with pytest.raises(BuilderError, match=f"--mode {mode} for rtx-blackwell cannot run here: .*no NVIDIA") as failure:
        bench.bench(request(gated_mlps, mode=mode), Recorded())
    assert failure.value.exit_code == errors.UNAVAILABLE


def test_on_another_gpu_it_times_the_plugins(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (9, 0))
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
    assert bench.tables(result)


def test_what_the_sums_leave_out_is_said(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("this GPU has no FP8\nand more")

    monkeypatch.setattr(backend, "local_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(subgraph_bench, "_fp8", refuse)
    plan = Plan.load(_planned(gated_mlps))
    plan.subgraphs[1].decision = "bf16"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    asked = request(gated_mlps, plan=edited)
    result = bench.bench(asked, Recorded(), CpuDevice, lambda arch: ReferenceHost())
    assert list(result.contestants) == ["nvfp4", "bf16"]
    assert result.notes[1:] == [
        "not timed, as only dense NVFP4 subgraphs are: gated_mlp_1",
        "no fp8 baseline of gated_mlp_0: this GPU has no FP8",
    ]


def test_copies_of_weights_are_four_times_the_cache(rng: np.random.Generator) -> None:
    for weight, cache in rng.integers(1 << 10, 1 << 26, (50, 2)):
        copies = subgraph_bench._copies(float(weight), int(cache))
        assert 2 <= copies <= 256
        assert copies == 256 or copies * weight >= 4 * cache
        assert copies == 2 or (copies - 1) * weight < 4 * cache


def test_a_wrong_plugin_is_not_timed(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (9, 0))
    with pytest.raises(BuilderError, match="relative error") as failure:
        bench.bench(request(gated_mlps), Recorded(), CpuDevice, lambda arch: ReferenceHost(wrong=1.2))
    assert failure.value.exit_code == errors.VERIFICATION_FAILED


class FakeTensorRT:
    """Stands for TensorRT's Python API: an engine computes what the rewritten ONNX beside it computes."""

    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")

    class IProfiler:
        pass

    class Engine:
        num_io_tensors = 2

        def __init__(self, path: Path) -> None:
            rewritten = path.with_suffix(".rewritten.onnx")
            # ONNX Runtime has no FP4.
            self.session = ReferenceEvaluator(str(rewritten)) if bench.NATIVE in path.name else session(rewritten)

        def get_tensor_name(self, index: int) -> str:
            return ("x", "y1")[index]

        def get_tensor_mode(self, name: str) -> str:
            return "input" if name == "x" else "output"

        def get_tensor_dtype(self, name: str) -> Any:
            return SimpleNamespace(name="HALF")

        def create_execution_context(self) -> FakeTensorRT.Context:
            return FakeTensorRT.Context(self)

    class Context:
        profiler: Any = None

        def __init__(self, engine: FakeTensorRT.Engine) -> None:
            self.engine, self.addresses, self.shape = engine, {}, ()

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self.shape = shape
            return shape[-1] == 64

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return self.shape

        def set_tensor_address(self, name: str, address: int) -> None:
            self.addresses[name] = address

        def execute_async_v3(self, stream: int) -> bool:
            size = int(np.prod(self.shape)) * 2
            x = np.frombuffer(ctypes.string_at(self.addresses["x"], size), np.float16).reshape(self.shape)
            (y,) = self.engine.session.run(None, {"x": x})
            ctypes.memmove(self.addresses["y1"], y.tobytes(), size)
            if self.profiler is not None:
                self.profiler.report_layer_time("gated_mlp_0", 0.25)
            return True


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="builds with TensorRT-RTX")
@pytest.mark.parametrize("given", ["onnx", "engine"])
def test_whole_engines(gated_mlps: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are built in earnest; running them is what this machine cannot do."""
    subject = gated_mlps
    if given == "engine":
        subject = gated_mlps.parent / "out" / "o.engine"
        pipeline.run(pipeline.Request(gated_mlps, find_target("rtx-blackwell"), subject), Recorded())
    loaded = SimpleNamespace(trt=FakeTensorRT)
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (12, 0))
    monkeypatch.setattr(engine_bench.runtime, "load_engine", lambda path: (FakeTensorRT.Engine(path), loaded))
    progress = Recorded()
    result = bench.bench(request(subject, target=None, shapes={"x": (16, 64)}), progress, CpuDevice)
    assert result.mode == "engine"
    assert result.target == "rtx-blackwell"
    built = [stage for stage in progress.stages if stage.startswith("building the ")]
    ours = ["building the nvfp4 engine"] if given == "onnx" else []
    assert built == [*ours, *(f"building the {name} engine" for name in ("native_nvfp4", "fp8", "bf16"))]
    assert list(result.contestants) == ["nvfp4", "native_nvfp4", "fp8", "bf16"]
    assert result.notes == []
    assert all({"median_us", "p90_us", "p99_us"} <= times.keys() for times in result.contestants.values())
    assert result.layers["nvfp4"] == [{"layer": "gated_mlp_0", "us": 250.0}]
    assert result.cosine_to_bf16["bf16"] == pytest.approx(1)
    assert 0.95 < result.cosine_to_bf16["nvfp4"] < result.cosine_to_bf16["fp8"] < 1
    assert 0.95 < result.cosine_to_bf16["native_nvfp4"] < result.cosine_to_bf16["fp8"]
    assert list(bench.tables(result)[0].columns[-1].cells)[-1] == "1.00000"


def contestants(model: Path, folder: Path, target: str, **options: Any) -> tuple[dict[str, Plan], list[str]]:
    asked = request(model, target=target, **options)
    folder.mkdir(exist_ok=True)
    builds, notes = bench._builds(asked, bench._subject(asked, CpuDevice), folder / "sample.npz", folder)
    assert not any(build.accuracy_samples for build in builds.values()), "engines alone are compared"
    return {name: Plan.load(build.plan) for name, build in builds.items() if build.plan}, notes


def test_baselines_are_tensorrts_own(gated_mlps: Path, tmp_path: Path) -> None:
    plans, notes = contestants(gated_mlps, tmp_path / "a", "b200")
    decisions = {name: {entry.decision for entry in plan.subgraphs} for name, plan in plans.items()}
    assert decisions == {"nvfp4": {"nvfp4_w4a16"}, "native_nvfp4": {"native_nvfp4"}, "fp8": {"fp8"}, "bf16": {"keep"}}
    assert notes == []
    plans, notes = contestants(gated_mlps, tmp_path / "b", "h200")
    assert list(plans) == ["nvfp4", "fp8", "bf16"]
    assert {entry.op for entry in plans["fp8"].subgraphs} == {""}, "not our own FP8 plugin"
    assert notes == [
        f"TensorRT's own NVFP4 is not built: {plans['fp8'].subgraphs[0].reason}".replace(
            "FP8,", "h200 does not compute native_nvfp4; FP8,"
        )
    ]


@pytest.mark.parametrize("deleted", [False, True])
def test_what_the_plan_keeps_is_the_same_for_all(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """No baseline replaces it, and no note says that its time is missing."""
    plan = Plan.load(_planned(gated_mlps))
    if deleted:
        del plan.subgraphs[1]
    else:
        plan.subgraphs[1].decision = "keep"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    plans, _ = contestants(gated_mlps, tmp_path / "a", "rtx-blackwell", plan=edited)
    replaced = {name: [e.name for e in found.subgraphs if e.decision != "keep"] for name, found in plans.items()}
    assert replaced == {name: ["gated_mlp_0"] for name in ("nvfp4", "native_nvfp4", "fp8")} | {"bf16": []}
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (9, 0))
    asked = request(gated_mlps, plan=edited)
    result = bench.bench(asked, Recorded(), CpuDevice, lambda arch: ReferenceHost())
    assert not [note for note in result.notes if "not timed" in note]


def test_native_nvfp4_that_cannot_be_built_is_said(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def run(build: pipeline.Request, progress: Any) -> None:
        built.append(build.output and build.output.stem)
        if built[-1] == "native_nvfp4":
            raise BuilderError(
                errors.VERIFICATION_FAILED, "expected a layer that reads native_nvfp4, TensorRT built Half"
            )

    monkeypatch.setattr(bench.pipeline, "run", run)
    monkeypatch.setattr(bench, "bench_engines", lambda device, engines, *_: ({name: {} for name in engines}, {}, {}))
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (12, 0))
    result = bench.bench(request(gated_mlps, mode="engine"), Recorded(), CpuDevice)
    assert built == ["nvfp4", "native_nvfp4", "fp8", "bf16"]
    assert list(result.contestants) == ["nvfp4", "fp8", "bf16"]
    assert result.notes == [
        "TensorRT's own NVFP4 is not realized: expected a layer that reads native_nvfp4, TensorRT built Half"
    ]


def test_temporary_files_lie_beside_the_result(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in /tmp, which may be memory; and nothing of them is left."""
    folders = set()
    asked = []

    def run(build: pipeline.Request, progress: Any) -> None:
        folders.add(build.base.parent)

    monkeypatch.setattr(bench.pipeline, "run", run)
    monkeypatch.setattr(bench, "bench_engines", lambda device, engines, *_: ({name: {} for name in engines}, {}, {}))
    monkeypatch.setattr(backend, "local_compute_capability", lambda: (12, 0))
    (out := gated_mlps.with_name("results")).mkdir()
    bench.bench(request(gated_mlps, mode="engine", folder=out), Recorded(), CpuDevice)
    (folder,) = folders
    assert folder.parent == out
    assert not list(out.iterdir())

    monkeypatch.setattr(bench, "bench", lambda request, _: asked.append(request.folder) or bench.Result("", "", ""))
    monkeypatch.setattr(bench, "tables", lambda _: [])
    for arguments in ([str(out / "o.engine")], [str(gated_mlps), "-o", str(out / "b.json")], [str(gated_mlps)]):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
    assert asked == [out, out, None]


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
    Path("o.plan.yaml").write_bytes(_planned(gated_mlps).read_bytes())
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
    engine = _planned(gated_mlps).with_name("o.engine")
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


@pytest.mark.parametrize(
    ("profiles", "tokens"),
    [({"x": [[1, 64], [48, 64], [96, 64]]}, 48), ({"x": 3}, 128), ([1], 128), ({"x": [["a"], ["a"], ["a"]]}, 128)],
)
def test_an_engine_is_predicted_at_its_typical_shapes(gated_mlps: Path, profiles: Any, tokens: int) -> None:
    """By the report beside it, if that is one."""
    engine = _planned(gated_mlps).with_name("o.engine")
    engine.write_bytes(b"an engine that is not run")
    report = json.loads(engine.with_suffix(".report.json").read_text())
    engine.with_suffix(".report.json").write_text(json.dumps(report | {"profiles": profiles}))
    result = bench.bench(request(engine, target=None, mode="roofline"), Recorded(), CpuDevice)
    assert {entry["tokens"] for entry in result.subgraphs} == {tokens}


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


@pytest.mark.gpu
def test_plugins_on_this_gpu(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", hidden=256, intermediate=512)
    few = {"x": (4, 256)}  # of more tokens the plan for this target is FP8
    asked = bench.Request(model, mode="plugins", target="h200", shapes=few, rounds=5)
    result = bench.bench(asked, Recorded(), CudaDevice)
    assert 0 < result.contestants["nvfp4"]["median_us"] < 1e4
    assert 0 < result.contestants["bf16"]["median_us"] < 1e4
