"""The build script, run by TensorRT-RTX for SM120 on the CPU."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser
from planned_nodes import planned_nodes

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import (
    BUILD_FAILED,
    INTERRUPTED,
    MODEL_AT_FAULT,
    UNAVAILABLE,
    USAGE,
    VERIFICATION_FAILED,
    BuilderError,
)
from trt_nvfp4.builder.generate.drafts.open import drafter_beside
from trt_nvfp4.builder.inputs.shapes import Profile
from trt_nvfp4.builder.records.bundle import DRAFT, MANIFEST
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import build_script, bundle
from trt_nvfp4.builder.tensorrt.build_process import estimate_memory, run_script
from trt_nvfp4.builder.tensorrt.verify import Layer, PlannedNodes

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")

PROFILES = {"x": Profile((1, 64), (4, 64), (8, 64))}


def folder_of(
    tmp_path: Path,
    model: Path,
    planned: Sequence[PlannedNodes],
    profiles: dict[str, Profile] = PROFILES,
    **options: Any,
) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    bundle.write_folder(
        folder, find_target("rtx-blackwell"), model, planned, [profiles], None, bundle.FolderOptions(**options)
    )
    return folder


def fails(folder: Path, says: str, code: int, names: Mapping[Path, Path] | None = None) -> None:
    with pytest.raises(BuilderError, match=says) as failure:
        run_script(folder, folder.parent / "out.engine", lambda event: None, names)
    assert failure.value.exit_code == code


def test_engine_is_built_and_checked(tmp_path: Path, fp8_and_bf16: Path) -> None:
    planned = [planned_nodes("first", "fp8", "mm8"), planned_nodes("second", "bf16", "mm16")]
    events: list[dict[str, Any]] = []
    engine = tmp_path / "out.engine"
    result = run_script(folder_of(tmp_path, fp8_and_bf16, planned), engine, events.append)
    assert engine.stat().st_size == result["engine_bytes"] > 0
    assert [entry["realized"] for entry in result["subgraphs"]] == ["fp8", "bf16"]
    assert result["peak_rss_bytes"] > 50 << 20
    assert {"parse", "build", "check"} <= {event.get("stage") for event in events}
    steps = [event for event in events if event["event"] == "step"]
    assert steps
    assert steps[-1]["step"] == steps[-1]["steps"]


@pytest.mark.parametrize("quantized", [True, False])
def test_fp8_weights_alone_are_no_fp8_product(tmp_path: Path, fp8_and_bf16: Path, quantized: bool) -> None:
    model = onnx.load(fp8_and_bf16)
    if not quantized:
        next(node for node in model.graph.node if node.name == "mm8").input[0] = "x"
        onnx.save(model, fp8_and_bf16)
    folder = folder_of(tmp_path, fp8_and_bf16, [planned_nodes("first", "fp8", "mm8", quantized=("mm8",))])
    if quantized:
        assert run_script(folder, tmp_path / "out.engine", lambda event: None)["subgraphs"][0]["realized"] == "fp8"
        return
    with pytest.raises(BuilderError, match="'mm8': expected a layer that reads activations and weights in fp8"):
        run_script(folder, tmp_path / "out.engine", lambda event: None)


def test_another_precision_than_planned_fails_and_leaves_no_engine(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [planned_nodes("second", "fp8", "mm16")])
    fails(folder, "second: node 'mm16': expected a layer that reads fp8", VERIFICATION_FAILED)
    assert not list(tmp_path.glob("*.engine"))
    assert not list(tmp_path.glob(".*"))


def test_external_data_travels_under_the_folders_own_names(tmp_path: Path, gated_mlps: Path) -> None:
    planned = [planned_nodes("mlp", "fp16", "up_proj0", "down_proj1")]
    folder = folder_of(tmp_path, gated_mlps, planned)
    moved = tmp_path / "elsewhere" / "folder"
    moved.parent.mkdir()
    folder.rename(moved)
    for file in tmp_path.glob("model.onnx*"):
        file.unlink()
    result = run_script(moved, tmp_path / "out.engine", lambda event: None)
    assert result["subgraphs"][0]["realized"] == "fp16"


def test_unknown_operator_is_named(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "acme": 1]>
        g (float16[tokens, 64] x) => (float16[tokens, 64] y) { a = Relu(x) [the_node] y = acme.Strange(a) }""")
    onnx.save(model, tmp_path / "strange.onnx")
    fails(folder_of(tmp_path, tmp_path / "strange.onnx", []), r"'the_node'.*Strange", MODEL_AT_FAULT)


def test_missing_profile_is_reported(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], profiles={})
    fails(folder, "TensorRT built no engine", BUILD_FAILED)


def test_changed_file_of_a_bundle_is_found(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\0")
    fails(folder, r"model\.onnx: missing or changed", MODEL_AT_FAULT)


@pytest.mark.parametrize(
    ("change", "text", "code"),
    [
        ({"compute_capability": [9, 0]}, "builds no engine for SM90", UNAVAILABLE),
        ({"modules": {"tensorrt_rtx": "999.0"}}, "too old", UNAVAILABLE),
        ({"modules": {"no_such_tensorrt": "1.0"}}, "'no_such_tensorrt' is not a TensorRT module", MODEL_AT_FAULT),
        ({"profiles": 3}, "not a manifest", MODEL_AT_FAULT),
    ],
)
def test_manifest_that_cannot_be_carried_out(
    tmp_path: Path, fp8_and_bf16: Path, change: dict[str, Any], text: str, code: int
) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    fails(folder, text, code)


@pytest.mark.parametrize(
    ("versions", "gpu", "chosen"),
    [
        ({"tensorrt_rtx": "1.7.1", "tensorrt": "11.0"}, (12, 0), "tensorrt_rtx"),
        ({"tensorrt_rtx": "1.6.1", "tensorrt": "10.13.2"}, (12, 0), "tensorrt"),
        ({"tensorrt": "10.13.2"}, (12, 0), "tensorrt"),
        # What none can do is said by the first.
        ({"tensorrt_rtx": "1.1.9", "tensorrt": "10.13.2"}, None, "tensorrt_rtx"),
        ({"tensorrt_rtx": "1.1.9", "tensorrt": "10.9"}, (12, 0), "tensorrt_rtx"),
        ({"tensorrt": "10.9"}, None, "tensorrt"),
        ({}, (12, 0), "tensorrt_rtx"),
    ],
)
def test_the_first_package_that_serves_builds(
    tmp_path: Path,
    fp8_and_bf16: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    gpu: tuple[int, int] | None,
    chosen: str,
) -> None:
    """rtx-blackwell takes TensorRT-RTX from 1.7, or else TensorRT from 10.13 on its own GPU."""
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: versions.get(name))
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions[name])
    monkeypatch.setattr(driver, "local_compute_capability", lambda: gpu)
    assert build_script.read_job(folder / MANIFEST, tmp_path / "out.engine").module == chosen


@pytest.mark.parametrize(
    ("engine", "report"),
    [
        ("o.engine", "o.report.json"),
        ("o.plan", "o.report.json"),
        ("Qwen2.5-7B.engine", "Qwen2.5-7B.report.json"),
        ("Qwen2.5-7B", "Qwen2.5-7B.report.json"),
    ],
)
def test_reports_are_called_as_their_engines(engine: str, report: str, tmp_path: Path) -> None:
    assert build_script.report_file(tmp_path / engine) == tmp_path / report


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("os.kill(os.getpid(), 9)", r"was ended by SIGKILL \(out of memory\?\): no message"),
        (r"print('7\n[1]\nlast words', flush=True); os.abort()", r"SIGABRT: 7 \| \[1\] \| last words"),
    ],
)
def test_script_that_dies_is_reported(script: str, message: str, tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    (folder / bundle.SCRIPT).write_text(f"import os\n{script}\n")
    fails(folder, message, BUILD_FAILED)


def test_memory_estimate_counts_external_data(gated_mlps: Path) -> None:
    data = gated_mlps.with_name("model.onnx.data").stat().st_size
    estimate = estimate_memory(gated_mlps)
    assert estimate.weights == gated_mlps.stat().st_size + data
    assert estimate.needed > 2 * estimate.weights
    assert estimate.fits


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_script_that_is_ended_while_it_writes_leaves_nothing(
    tmp_path: Path, fp8_and_bf16: Path, ending: signal.Signals
) -> None:
    """As a service manager or a container ends it: an engine of gigabytes takes long to reach the disk."""
    slow_disk = tmp_path / "slow_disk"
    slow_disk.mkdir()
    # In short sleeps: a signal that arrives just before a long one begins would be seen only at its end.
    (slow_disk / "sitecustomize.py").write_text(
        "import os, time\nos.fsync = lambda file: [time.sleep(0.01) for _ in range(10_000)]\n"
    )
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    out = tmp_path / "out"
    script = subprocess.Popen(
        [sys.executable, folder / bundle.SCRIPT, "-o", out / "model.engine"],
        env={**os.environ, "PYTHONPATH": str(slow_disk)},
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list(out.glob(".trt-nvfp4-*/model.engine")):
        assert script.poll() is None, script.stderr and script.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(ending)
    _, said = script.communicate(timeout=60)
    assert script.returncode == INTERRUPTED
    assert said.endswith("error: interrupted; nothing half-written was left\n")
    assert list(out.iterdir()) == []


def test_messages_name_the_users_files(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float16[2, 8] x, int64[2] sizes) => (float16[a, b] y) { y = Reshape(x, sizes) }""")
    onnx.save(model, tmp_path / "mine.onnx")
    folder = folder_of(tmp_path, tmp_path / "mine.onnx", [], {})
    names = {folder / "model.onnx": tmp_path / "mine.onnx"}
    fails(folder, r"/mine\.onnx: the values of input 'sizes' are a shape", MODEL_AT_FAULT, names)
    result = {"event": "result", "warnings": [f"{folder / 'model.onnx'}: odd"]}
    (folder / bundle.SCRIPT).write_text(f"print({json.dumps(json.dumps(result))})\n")
    found = run_script(folder, tmp_path / "out.engine", lambda event: None, names)
    assert found["warnings"] == [f"{tmp_path / 'mine.onnx'}: odd"]


def test_shape_that_tensorrt_refuses(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], {"x": Profile((1, 64), (1, 64), (3 * 10**9, 64))})
    fails(folder, r"TensorRT refused the shapes .* of 'x'", USAGE)


def run_as_on_the_device(
    folder: Path, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, folder / bundle.SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})


@pytest.mark.parametrize("name", [MANIFEST, bundle.SCRIPT, "model.onnx", "timing.cache"])
def test_output_over_the_bundle_is_refused(tmp_path: Path, fp8_and_bf16: Path, name: str) -> None:
    (tmp_path / "mine.cache").write_bytes(b"timings")
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True, timing_cache=tmp_path / "mine.cache")
    before = (folder / name).read_bytes()
    done = run_as_on_the_device(folder, "-o", folder / name)
    assert done.returncode == USAGE
    assert f"{name}: would be written over, and belongs to the bundle" in done.stderr
    assert (folder / name).read_bytes() == before


def test_output_that_is_no_file_is_refused_before_the_build(tmp_path: Path, fp8_and_bf16: Path) -> None:
    """As root, a rename would put the engine in place of a device."""
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", folder):
        done = run_as_on_the_device(folder, "-o", output)
        assert done.returncode == USAGE
        assert f"{output}: is a folder or a device" in done.stderr
        assert "build ..." not in done.stderr
    assert (tmp_path / "pipe").is_fifo()


def test_folder_that_cannot_be_written_to_is_found_before_the_build(
    tmp_path: Path, fp8_and_bf16: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)

    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write anywhere
    monkeypatch.setattr(build_script, "_offer_unversioned_library", lambda module: None)
    monkeypatch.setattr(build_script, "run", lambda job, report: pytest.fail("it built"))
    monkeypatch.setattr(sys, "argv", [bundle.SCRIPT, "--events"])
    assert build_script.main(folder) == BUILD_FAILED
    assert f"{folder}: Permission denied; choose a folder you can write to with -o" in capsys.readouterr().out


def test_output_in_a_new_folder_and_with_dots_in_its_name(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    out = tmp_path / "new" / "folder"
    done = run_as_on_the_device(folder, "-o", out / "Qwen2.5-7B")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["Qwen2.5-7B", "Qwen2.5-7B.report.json"]


@pytest.mark.slow
@pytest.mark.parametrize("output", [None, "Qwen2.5-7B", "t.plan"])
def test_the_drafter_in_a_bundle_is_built_too(tmp_path: Path, fp8_and_bf16: Path, output: str | None) -> None:
    """By the same process, which has given up its temporary links by then; generate finds it beside the model."""
    (folder := folder_of(tmp_path, fp8_and_bf16, [], keep=True)).rename(tmp_path / "model")
    folder_of(tmp_path, fp8_and_bf16, [], keep=True).rename(tmp_path / "model" / DRAFT)
    folder = tmp_path / "model"
    given = [] if output is None else ["-o", tmp_path / output]
    environment = {"TRT_NVFP4_CACHE": "/dev/null/none", "TMPDIR": str(tmp_path)}
    done = run_as_on_the_device(folder, *given, environment=environment)
    assert done.returncode == 0, done.stderr
    engine = folder / "model.engine" if output is None else tmp_path / output
    drafter = folder / DRAFT / "model.engine" if output is None else build_script.base_of(engine)
    if output is not None:
        drafter = drafter.with_name(f"{drafter.name}.draft.engine")
    for file in (engine, drafter):
        built = json.loads(build_script.report_file(file).read_text())
        assert file.stat().st_size == built["engine_bytes"] > 0
    if output != "Qwen2.5-7B":  # which generate does not know as an engine
        assert drafter_beside(engine) == drafter


def test_a_drafter_that_is_broken_fails_the_build(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    (folder / DRAFT).mkdir()
    (folder / DRAFT / MANIFEST).write_text("{}")
    done = run_as_on_the_device(folder)
    assert done.returncode == MODEL_AT_FAULT
    assert f"{folder / DRAFT / MANIFEST}: not a manifest of trt-nvfp4" in done.stderr


def test_the_links_lie_in_the_cache_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRT_NVFP4_CACHE", "~/kept")
    monkeypatch.delenv("TRT_NVFP4_LIBRARY_LINKS", raising=False)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(build_script.os, "execve", lambda file, arguments, environment: started.append(environment))
    build_script._offer_unversioned_library("tensorrt_rtx")
    assert Path(started[0]["TRT_NVFP4_LIBRARY_LINKS"]).parent == tmp_path / "kept" / "links"


def test_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run under a user of its own."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build_script.Path, "home", no_home)
    monkeypatch.delenv("TRT_NVFP4_CACHE", raising=False)
    monkeypatch.delenv("TRT_NVFP4_LIBRARY_LINKS", raising=False)
    monkeypatch.setattr(build_script.tempfile, "tempdir", str(tmp_path))
    started: list[dict[str, str]] = []
    monkeypatch.setattr(build_script.os, "execve", lambda file, arguments, environment: started.append(environment))
    build_script._offer_unversioned_library("tensorrt_rtx")
    links = Path(started[0]["TRT_NVFP4_LIBRARY_LINKS"])
    assert links.parent == tmp_path
    assert (links / "libtensorrt_rtx.so").exists()


def test_temporary_links_are_gone_when_the_build_starts(tmp_path: Path, fp8_and_bf16: Path) -> None:
    """The library is known by its unversioned name once it is loaded by that."""
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    (tmp_path / "temporary").mkdir()
    read_only = tmp_path / "cache"
    read_only.write_text("")  # root may write into any folder
    environment = {"TRT_NVFP4_CACHE": str(read_only), "TMPDIR": str(tmp_path / "temporary")}
    done = run_as_on_the_device(folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "temporary").iterdir())


def test_what_is_printed_need_not_be_utf8(tmp_path: Path) -> None:
    (tmp_path / bundle.SCRIPT).write_text(f"""import os
os.write(2, b"TensorRT: caf\\xe9\\n")
print('{{"event": "error", "exit_code": {UNAVAILABLE}, "message": "too old"}}')
""")
    fails(tmp_path, "too old", UNAVAILABLE)


@pytest.mark.parametrize(
    ("engine", "layers", "says"),
    [
        (b"", [Layer("a", "gemm", (), frozenset())], "returned an empty engine"),
        (b"engine", [], "listed no layers: what it built cannot be checked"),
    ],
)
def test_engine_that_is_empty_or_without_layers_is_no_success(
    engine: bytes, layers: list[Layer], says: str, tmp_path: Path, fp8_and_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    monkeypatch.setattr(
        build_script.Backend, "build", lambda self, job, library, report: (memoryview(engine), layers, [], {})
    )
    job = build_script.read_job(folder / MANIFEST, tmp_path / "out.engine")
    with pytest.raises(BuilderError, match=says) as failure:
        build_script.run(job, lambda event: None)
    assert failure.value.exit_code == VERIFICATION_FAILED
    assert not list(tmp_path.glob("*out.engine*"))


@pytest.mark.parametrize("shapes", [(256, 256, 512), (1, 256, 256), (256, 300, 512)])
def test_shapes_of_the_profile_that_the_model_does_not_take(tmp_path: Path, shapes: tuple[int, int, int]) -> None:
    """Of the least and the most TensorRT warns alone."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float16[n, 64] x) => (float16[m, 64] y) <int64[2] s = {256, 64}> { r = Reshape(x, s) y = Relu(r) }""")
    onnx.save(model, tmp_path / "m.onnx")
    profiles = {"x": Profile(*((n, 64) for n in shapes))}
    fails(
        folder_of(tmp_path, tmp_path / "m.onnx", [], profiles),
        r"does not take all shapes of the profile.*k\w+ values.*--max-shapes",
        USAGE,
    )
    assert not (tmp_path / "out.engine").exists()


def test_warnings_are_said_once(tmp_path: Path, fp8_and_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    built = memoryview(b"engine"), [Layer("a", "gemm", (), frozenset())], ["b", "a", "b"], {}
    monkeypatch.setattr(build_script.Backend, "build", lambda self, job, library, report: built)
    job = build_script.read_job(folder / MANIFEST, tmp_path / "out.engine")
    assert build_script.run(job, lambda event: None)["warnings"] == ["b", "a"]


def test_library_for_another_machine(tmp_path: Path, fp8_and_bf16: Path) -> None:
    """A bundle for Spark, on an x86-64 machine with TensorRT-RTX."""
    library = bytearray(Path(sys.executable).resolve().read_bytes()[:4096])
    library[18:20] = b"\xb7\0" if platform.machine() == "x86_64" else b"\x3e\0"  # e_machine
    (tmp_path / "libplugins-foreign.so").write_bytes(library)
    folder = tmp_path / "folder"
    folder.mkdir()
    foreign = tmp_path / "libplugins-foreign.so"
    bundle.write_folder(folder, find_target("spark"), fp8_and_bf16, [], [PROFILES], bundle.Plugins(foreign))
    fails(folder, "could not load this plugin library on " + platform.machine(), BUILD_FAILED)
