"""Bundles: what a device gets, built in an environment with nothing but TensorRT-RTX."""

import ast
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from command_lines import invoked
from planned_nodes import planned_nodes

from onnx_models.graphs import mlp_model, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.cli.inspect_engine import app as inspect_app
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, USAGE, BuilderError, UsageError
from trt_nvfp4.builder.pipeline import build_step, pipeline
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.builder.report.inspection import inspect
from trt_nvfp4.builder.targets import TARGETS, find_target
from trt_nvfp4.builder.tensorrt import bundle
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.compile.toolchain import ToolchainError

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")


def make_bundle(model: Path, destination: Path, target: str = "rtx-blackwell") -> dict[str, object]:
    pipeline.run(pipeline.Request(model=model, target=find_target(target), bundle=destination))
    manifest: dict[str, object] = json.loads((destination / MANIFEST).read_text())
    return manifest


def test_script_runs_the_builders_own_modules(tmp_path: Path, gated_mlps: Path) -> None:
    make_bundle(gated_mlps, tmp_path / "bundle")
    code = tmp_path / "bundle" / bundle.SOURCES / "trt_nvfp4"
    carried = {str(file.relative_to(code)): file.read_bytes() for file in code.rglob("*.py")}
    assert carried == {name: bundle.source_of(name).read_bytes() for name in bundle.MODULES}


def test_script_needs_nothing_but_what_it_carries(tmp_path: Path, gated_mlps: Path) -> None:
    """-I: no site-packages of the user's, no PYTHONPATH, and -S: none at all. Without its modules it says so."""
    make_bundle(gated_mlps, tmp_path / "bundle")
    command = [sys.executable, "-IS", tmp_path / "bundle" / bundle.SCRIPT, "-o", tmp_path / "o.engine"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == UNAVAILABLE
    assert "cannot import tensorrt_rtx" in done.stderr
    shutil.rmtree(tmp_path / "bundle" / bundle.SOURCES)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == MODEL_AT_FAULT
    assert "copy the whole bundle again" in done.stderr
    assert "Traceback" not in done.stderr


def test_script_of_an_older_python(tmp_path: Path, gated_mlps: Path) -> None:
    make_bundle(gated_mlps, tmp_path / "bundle")
    older = "import runpy, sys; sys.version_info = (3, 8, 18); runpy.run_path('build_engine.py')"
    done = subprocess.run([sys.executable, "-c", older], cwd=tmp_path / "bundle", capture_output=True, text=True)
    assert done.returncode == UNAVAILABLE
    assert done.stderr == "error: Python 3.8.18 is too old; run this with 3.9 or newer, such as python3.9\n"
    # Which has to understand as much as it runs.
    ast.parse((tmp_path / "bundle" / bundle.SCRIPT).read_text(), feature_version=(3, 7))


def test_bundle_that_another_run_has_finished_since(
    tmp_path: Path, gated_mlps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, write = tmp_path / "bundle", bundle.write_folder

    def write_second(*arguments: Any, **options: Any) -> Path:
        destination.mkdir()
        (destination / MANIFEST).write_text("theirs")
        return write(*arguments, **options)

    monkeypatch.setattr(bundle, "write_folder", write_second)
    command = [str(gated_mlps), "--bundle", str(destination), "--target", "rtx-blackwell"]
    invoked(app, command, USAGE, f"{destination}: exists already; choose a new folder or remove this one")
    assert [file.read_text() for file in destination.iterdir()] == ["theirs"]


def computed(model: Path) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32).astype(np.float16)
    (output,) = onnxruntime.InferenceSession(model).run(None, {"x": x})
    return np.asarray(output)


def rewritten_beside(model: Path, output: Path) -> Path:
    pipeline.run(pipeline.Request(model, find_target("rtx-blackwell"), output=output, stop_after="rewrite"))
    return output.with_suffix(".rewritten.onnx")


@pytest.mark.parametrize("strip", [False, True])
def test_weights_lie_in_the_bundle_alone(strip: bool, tmp_path: Path, gated_mlps: Path) -> None:
    """No file has two names, from which onnx loads no weights. The rewritten model computes with those of the bundle,
    by its own functions."""
    expected = computed(rewritten_beside(gated_mlps, tmp_path / "o.engine"))
    made = tmp_path / "made" / "bundle"
    pipeline.run(pipeline.Request(gated_mlps, find_target("rtx-blackwell"), bundle=made, strip=strip))
    assert all(file.stat().st_nlink == 1 for file in made.parent.rglob("*") if file.is_file())
    assert not made.with_name("bundle.rewritten.onnx.data").exists()
    model = made.with_name("bundle.rewritten.onnx")
    onnx.load(model)
    np.testing.assert_array_equal(computed(model), expected)


def test_a_bundle_whose_weights_are_not_yet_its_own_alone_is_removed(
    tmp_path: Path, gated_mlps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the rewritten model's weights have a name in the bundle too."""
    library, made = tmp_path / "library.so", tmp_path / "made" / "bundle"
    library.write_bytes(b"?")
    shared: list[Path] = []

    def interrupted(model: Path, folder: Path) -> None:
        shared.extend(file for file in folder.rglob("*") if file.is_file() and file.stat().st_nlink > 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(build_step, "build_library", lambda *_, **__: library)
    monkeypatch.setattr(bundle, "share_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_bundle(gated_mlps, made)
    assert shared
    assert not made.exists()
    onnx.load(made.with_name("bundle.rewritten.onnx"))


def test_a_rewritten_model_that_is_given_stays(tmp_path: Path, gated_mlps: Path) -> None:
    model = rewritten_beside(gated_mlps, tmp_path / "o.engine")
    given = {file: file.read_bytes() for file in tmp_path.glob("o.rewritten.onnx*")}
    assert len(given) == 2
    made = tmp_path / "bundle"
    pipeline.run(pipeline.Request(model, find_target("rtx-blackwell"), bundle=made, plan=tmp_path / "o.plan.yaml"))
    assert {file: file.read_bytes() for file in given} == given
    assert all(file.stat().st_nlink == 1 for file in made.rglob("*") if file.is_file())


@pytest.mark.slow
def test_bundle_builds_where_there_is_only_tensorrt_rtx(tmp_path: Path, gated_mlps: Path) -> None:
    make_bundle(gated_mlps, tmp_path / "made" / "bundle")
    moved = tmp_path / "device" / "bundle"
    moved.parent.mkdir()
    (tmp_path / "made" / "bundle").rename(moved)
    for file in [*gated_mlps.parent.glob("model.onnx*"), *(tmp_path / "made").iterdir()]:
        file.unlink()
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    package = f"tensorrt-rtx=={importlib.metadata.version('tensorrt-rtx')}"
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", package], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"cannot install {package}: {installed.stderr[-300:]}")
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    done = subprocess.run([python, bundle.SCRIPT], cwd=moved, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((moved / "model.report.json").read_text())
    assert [entry["realized"] for entry in report["subgraphs"]] == ["nvfp4 plugin"] * 2
    assert report["plugin_layers"] == 2
    assert (moved / "model.engine").stat().st_size == report["engine_bytes"] > 0


def bundle_with_sources(tmp_path: Path, gated_mlps: Path) -> Path:
    """As an aarch64 target gets it from a machine that cannot cross-compile; the device here is this machine."""
    request = pipeline.Request(
        model=gated_mlps, target=find_target("rtx-blackwell"), output=tmp_path / "o.engine", stop_after="rewrite"
    )
    pipeline.run(request)
    planned = [planned_nodes("a", "nvfp4", "gated_mlp_0")]
    profiles = {"x": bundle.Profile((1, 64), (1, 64), (4, 64))}
    folder = tmp_path / "bundle"
    folder.mkdir()
    model = tmp_path / "o.rewritten.onnx"
    bundle.write_folder(
        folder,
        request.target,
        model,
        planned,
        [profiles],
        bundle.Plugins(with_sources=True),
        bundle.FolderOptions(keep=True),
    )
    return folder


def test_device_without_a_package_that_compiling_needs(tmp_path: Path, gated_mlps: Path) -> None:
    folder = bundle_with_sources(tmp_path, gated_mlps)
    without = (
        "import runpy, sys; sys.modules['filelock'] = None; runpy.run_path('build_engine.py', run_name='__main__')"
    )
    environment = {**os.environ, "TRT_NVFP4_LIBRARY_LINKS": str(tmp_path)}  # no start by another command line
    done = subprocess.run([sys.executable, "-c", without], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == UNAVAILABLE
    assert "needs the package filelock; install it: pip install filelock" in done.stderr
    assert "Traceback" not in done.stderr


def test_sources_in_a_bundle_know_the_ops_without_torch(tmp_path: Path, gated_mlps: Path) -> None:
    """By the header that travels with them; without site-packages there is neither Torch nor ONNX."""
    sources = bundle_with_sources(tmp_path, gated_mlps) / bundle.SOURCES
    code = (
        f"import sys; sys.path.insert(0, {str(sources)!r}); from trt_nvfp4.plugins.compile.op_header import op_header; "
        "print(op_header(), end='')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == op_header.op_header()
    assert "struct NVFP4Linear" in done.stdout


@pytest.mark.slow
def test_bundle_with_sources_compiles_them_on_the_device(tmp_path: Path, gated_mlps: Path) -> None:
    folder = bundle_with_sources(tmp_path, gated_mlps)
    # The library's own cache makes this quick where the same sources have been compiled before.
    done = subprocess.run([sys.executable, bundle.SCRIPT], cwd=folder, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "model.report.json").read_text())["plugin_layers"] == 2


@pytest.mark.slow
def test_targets_differ_in_target_alone(tmp_path: Path, gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which kernels the library holds does not matter here.
    monkeypatch.setattr(build_step, "build_library", lambda arch, groups, **_: build_library("sm_120a", groups=groups))
    manifests = {name: make_bundle(gated_mlps, tmp_path / name, name) for name in ("rtx-blackwell", "b200", "thor")}
    of_the_target = {"target", "arch", "compute_capability", "modules", "plugin_library", "plugin_sources", "checksums"}
    common = [{key: value for key, value in m.items() if key not in of_the_target} for m in manifests.values()]
    assert common[0] == common[1] == common[2]
    for name in manifests:
        found = inspect(tmp_path / name)
        assert found.target == name
        assert not found.changed_files
        assert manifests[name]["plugin_library"]


def test_inspection_finds_a_changed_file(tmp_path: Path, gated_mlps: Path) -> None:
    make_bundle(gated_mlps, tmp_path / "bundle")
    (tmp_path / "bundle" / "model.onnx").write_bytes(b"")
    assert inspect(tmp_path / "bundle").changed_files == ["model.onnx"]
    (tmp_path / "bundle" / "model.onnx").unlink()
    assert inspect(tmp_path / "bundle").changed_files == ["model.onnx"]


def test_inspection_shows_words(tmp_path: Path, gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_step, "_plugins", lambda *_: (None, False))
    manifest: dict[str, Any] = make_bundle(gated_mlps, tmp_path / "bundle", "thor")
    shown = invoked(inspect_app, [tmp_path / "bundle"], env={"COLUMNS": "300"}).stdout
    ((name, (least, opt, most)),) = manifest["profiles"][0].items()
    low, middle, high = ("x".join(map(str, shape)) for shape in (least, opt, most))
    assert f"{name}: {low} to {high}, tuned for {middle}" in shown
    assert not re.search(r"[{}\[\]']|None", shown)


def test_no_compiler_for_a_device_like_this_machine(
    tmp_path: Path, gated_mlps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have none either, perhaps: sources travel to another processor alone."""
    target = next(target for target in TARGETS.values() if target.host == platform.machine())
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(tmp_path / "no-nvcc"))
    with pytest.raises(ToolchainError, match="no-nvcc"):
        make_bundle(gated_mlps, tmp_path / "bundle", target.name)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("calibrated", [True, False])
def test_fp8_is_checked_at_the_product_or_at_the_weights_alone(gated_mlps: Path, calibrated: bool) -> None:
    source = load(gated_mlps)
    plan = plan_all(source, precision="fp8", kinds=("gated_mlp",), calibrated=calibrated)
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 50.0), 1) if calibrated else None
    path = rewritten(source, plan, statistics).path
    kinds = {node.name: node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    entries = bundle.planned_nodes(plan, path)
    carriers = [name for entry in entries for name in entry.engine_nodes]
    assert [kinds[name] for name in carriers] == ["MatMul" if calibrated else "DequantizeLinear"] * 6
    assert [name for entry in entries for name in entry.quantized] == (carriers if calibrated else [])


@pytest.mark.parametrize("calibrated", [True, False])
def test_fp8_weights_that_are_transposed(tmp_path: Path, calibrated: bool) -> None:
    model, _ = mlp_model(spec(linear="transpose"))
    onnx.save(model, tmp_path / "m.onnx")
    source = load(tmp_path / "m.onnx")
    plan = plan_all(source, precision="fp8", calibrated=calibrated)
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 50.0), 1) if calibrated else None
    path = rewritten(source, plan, statistics).path
    weights = [node for node in onnx.load(path).graph.node if node.op_type == "Transpose"]
    (entry,) = bundle.planned_nodes(plan, path)
    assert len(weights) == 3
    assert calibrated == all(name in entry.quantized for name in entry.engine_nodes)
    assert calibrated or sorted(entry.engine_nodes) == sorted(
        node.input[0].replace("dequantized", "dequantize") for node in weights
    )


def edit_rewritten(folder: Path, model: Path, edit: Callable[[onnx.ModelProto], object]) -> tuple[Plan, Path]:
    """Plan and rewritten model, which weights in FP8 alone, as another tool left it."""
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(model, target, folder / "o.engine", precision="fp8", stop_after="rewrite"))
    path = folder / "o.rewritten.onnx"
    proto = onnx.load(path, load_external_data=False)
    edit(proto)
    onnx.save(proto, path)
    return Plan.load(folder / "o.plan.yaml"), path


@pytest.mark.parametrize(("field", "text"), [("name", "has no such node"), ("op_type", "is of type renamed")])
def test_node_that_is_gone_from_the_rewritten_model(tmp_path: Path, gated_mlps: Path, field: str, text: str) -> None:
    def rename(proto: onnx.ModelProto) -> None:
        setattr(next(node for node in proto.graph.node if node.name == "down_proj1"), field, "renamed")

    plan, path = edit_rewritten(tmp_path, gated_mlps, rename)
    with pytest.raises(BuilderError, match=f"{path}: node 'down_proj1' should be a MatMul or Gemm.*{text}") as failure:
        bundle.planned_nodes(plan, path)
    assert "gated_mlp_1 in fp8" in str(failure.value)
    assert "rewrite the original model again" in str(failure.value)
    assert failure.value.exit_code == MODEL_AT_FAULT


def test_quantization_that_the_rewrite_noted_is_looked_for(tmp_path: Path, gated_mlps: Path) -> None:
    """Though the model no longer has it."""

    def note(proto: onnx.ModelProto) -> None:
        (entry,) = (entry for entry in proto.metadata_props if entry.key == REWRITTEN)
        entry.value = json.dumps(json.loads(entry.value) | {"quantized": ["up_proj0"]})

    entry, _ = bundle.planned_nodes(*edit_rewritten(tmp_path, gated_mlps, note))
    assert entry.quantized == ("up_proj0",)
    assert entry.engine_nodes.count("up_proj0") == 1


def test_timing_cache_of_a_bundle_may_grow(tmp_path: Path, gated_mlps: Path) -> None:
    """Every build on the device writes it."""
    cache = tmp_path / "mine.cache"
    cache.write_bytes(b"timings")
    request = pipeline.Request(gated_mlps, find_target("rtx-blackwell"), bundle=tmp_path / "b", timing_cache=cache)
    pipeline.run(request)
    assert (tmp_path / "b" / "timing.cache").read_bytes() == b"timings"
    (tmp_path / "b" / "timing.cache").write_bytes(b"timings and more")
    assert not inspect(tmp_path / "b").changed_files


Edit = Callable[[Plan], object]


@pytest.mark.parametrize(
    ("precision", "edit", "text"),
    [
        ("auto", lambda plan: setattr(plan.subgraphs[1], "decision", "keep"), "gated_mlp_1 is nvfp4_w4a16 .*keep"),
        ("auto", lambda plan: plan.subgraphs.pop(), "gated_mlp_1 is nvfp4_w4a16 there, and missing here"),
        ("auto", lambda plan: setattr(plan.subgraphs[0], "decision", "nvfp4_w4a4"), "gated_mlp_0 .* nvfp4_w4a4 here"),
        ("fp8", lambda plan: setattr(plan.subgraphs[1], "decision", "keep"), "gated_mlp_1 is fp8 there, and keep here"),
        ("auto", lambda plan: setattr(plan, "recipe", "max"), "its recipe is mse there, and max here"),
        ("auto", lambda plan: setattr(plan, "target", "ada"), "its target is rtx-blackwell there, and ada here"),
    ],
)
def test_plan_that_the_model_was_not_rewritten_by(
    tmp_path: Path, gated_mlps: Path, precision: str, edit: Edit, text: str
) -> None:
    """It was edited after the rewrite, or is another run's: nothing would check what the model holds beyond it."""
    target = find_target("rtx-blackwell")
    pipeline.run(pipeline.Request(gated_mlps, target, tmp_path / "o.engine", precision=precision, stop_after="rewrite"))
    plan = Plan.load(tmp_path / "o.plan.yaml")
    edit(plan)
    plan.save(tmp_path / "edited.plan.yaml")
    model = tmp_path / "o.rewritten.onnx"
    target = find_target(plan.target)
    request = pipeline.Request(model, target, tmp_path / "p.engine", plan=tmp_path / "edited.plan.yaml")
    expected = rf"o\.rewritten\.onnx: was rewritten by another plan than .*edited\.plan\.yaml: {text}"
    with pytest.raises(UsageError, match=expected):
        pipeline.run(request)
    assert not (tmp_path / "p.engine").exists()
