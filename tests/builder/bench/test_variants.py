"""The engines that bench-engine compares: how they are built, and its path on a TensorRT that tests stand in for."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_stand_ins import CpuDevice, Recorded, planned, request
from onnx.reference import ReferenceEvaluator
from reference_host import ReferenceHost

from trt_nvfp4.builder.bench import bench
from trt_nvfp4.builder.bench import engines as engine_bench
from trt_nvfp4.builder.bench.result import tables
from trt_nvfp4.builder.bench.subject import subject_of
from trt_nvfp4.builder.bench.variants import NATIVE, builds_of
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import VerificationError
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.plan import Plan


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
            self.session = ReferenceEvaluator(str(rewritten)) if NATIVE in path.name else session(rewritten)

        def get_tensor_name(self, index: int) -> str:
            return ("x", "y1")[index]

        def get_tensor_mode(self, name: str) -> str:
            return "input" if name == "x" else "output"

        def get_tensor_dtype(self, name: str) -> Any:
            return SimpleNamespace(name="HALF")

        def create_execution_context(self) -> "FakeTensorRT.Context":
            return FakeTensorRT.Context(self)

    class Context:
        profiler: Any = None

        def __init__(self, engine: "FakeTensorRT.Engine") -> None:
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
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (12, 0))
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
    assert list(tables(result)[0].columns[-1].cells)[-1] == "1.00000"


def contestants(model: Path, folder: Path, target: str, **options: Any) -> tuple[dict[str, Plan], list[str]]:
    asked = request(model, target=target, **options)
    folder.mkdir(exist_ok=True)
    builds, notes = builds_of(asked, subject_of(asked, CpuDevice), folder / "sample.npz", folder)
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
    plan = Plan.load(planned(gated_mlps))
    if deleted:
        del plan.subgraphs[1]
    else:
        plan.subgraphs[1].decision = "keep"
    plan.save(edited := gated_mlps.with_name("edited.yaml"))
    plans, _ = contestants(gated_mlps, tmp_path / "a", "rtx-blackwell", plan=edited)
    replaced = {name: [e.name for e in found.subgraphs if e.decision != "keep"] for name, found in plans.items()}
    assert replaced == {name: ["gated_mlp_0"] for name in ("nvfp4", "native_nvfp4", "fp8")} | {"bf16": []}
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
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
            raise VerificationError("expected a layer that reads native_nvfp4, TensorRT built Half")

    monkeypatch.setattr(bench.pipeline, "run", run)
    monkeypatch.setattr(bench, "bench_engines", lambda device, engines, *_: ({name: {} for name in engines}, {}, {}))
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (12, 0))
    result = bench.bench(request(gated_mlps, mode="engine"), Recorded(), CpuDevice)
    assert built == ["nvfp4", "native_nvfp4", "fp8", "bf16"]
    assert list(result.contestants) == ["nvfp4", "fp8", "bf16"]
    assert result.notes == [
        "TensorRT's own NVFP4 is not realized: expected a layer that reads native_nvfp4, TensorRT built Half"
    ]


def test_temporary_files_lie_beside_the_result(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in /tmp, which may be memory; and nothing of them is left."""
    folders = set()

    def run(build: pipeline.Request, progress: Any) -> None:
        folders.add(build.base.parent)

    monkeypatch.setattr(bench.pipeline, "run", run)
    monkeypatch.setattr(bench, "bench_engines", lambda device, engines, *_: ({name: {} for name in engines}, {}, {}))
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (12, 0))
    (out := gated_mlps.with_name("results")).mkdir()
    bench.bench(request(gated_mlps, mode="engine", folder=out), Recorded(), CpuDevice)
    (folder,) = folders
    assert folder.parent == out
    assert not list(out.iterdir())
