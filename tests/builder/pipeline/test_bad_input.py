"""What users get wrong: one message, the right exit code, no file left half-written."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import yaml
from click.testing import CliRunner, Result

from onnx_models.graphs import parsed
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.plugins.compile.library import build_library

BUILD = "from trt_nvfp4.builder.cli.build_engine import app; app()"

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")


def build(model: Path, *options: str, target: str = "rtx-blackwell") -> Result:
    """Run build-engine into `out/` beside the model."""
    output = model.parent / "out" / "o.engine"
    return CliRunner().invoke(app, [str(model), "-o", str(output), "--target", target, *options])


def assert_failed(result: Result, code: int, *texts: str) -> None:
    assert result.exit_code == code, result.output
    message = " ".join(result.stderr.split())
    assert "Traceback" not in message
    assert message.count("error:") == 1
    for text in texts:
        assert text in message
    assert not result.stdout


def leftovers(folder: Path) -> list[str]:
    """What of the output folder is hidden, temporary, an engine, or a folder that holds nothing."""
    found = list(folder.rglob("*"))
    named = [path for path in found if path.name.startswith(".") or path.suffix in (".engine", ".tmp")]
    return [str(path) for path in (*named, *(path for path in found if path.is_dir() and not any(path.iterdir())))]


def truncated(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-100])


def not_onnx(model: Path) -> None:
    model.write_text("import torch\n" * 50)


def without_data(model: Path) -> None:
    model.with_name(model.name + ".data").unlink()


def short_data(model: Path) -> None:
    data = model.with_name(model.name + ".data")
    os.truncate(data, data.stat().st_size - 1)


def with_unknown_op(model: Path) -> None:
    proto = onnx.load(model, load_external_data=False)
    proto.graph.node[0].op_type = "MatMull"
    onnx.save(proto, model)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncated, "model.onnx"),
        (not_onnx, "not an ONNX file"),
        (without_data, "model.onnx.data"),
        (short_data, "model.onnx.data"),
        (with_unknown_op, "MatMull"),
        (lambda model: model.unlink(), "no such file"),
    ],
    ids=["truncated", "not ONNX", "no external data", "short external data", "unknown op", "no file"],
)
def test_model_at_fault(gated_mlps: Path, damage: Callable[[Path], None], text: str) -> None:
    damage(gated_mlps)
    assert_failed(build(gated_mlps), errors.MODEL_AT_FAULT, text)
    assert not leftovers(gated_mlps.parent)


def test_no_mlp_says_what_there_is(tmp_path: Path) -> None:
    text = "g (float[batch, 64] x) => (float[batch, 64] y) { y = MatMul(x, w) }"
    onnx.save(parsed(text, {"w": (64, 64)}), tmp_path / "linear.onnx")
    result = build(tmp_path / "linear.onnx")
    assert_failed(result, errors.MODEL_AT_FAULT, "found no subgraph of kind moe or gated_mlp or mlp", "--kinds linear")


def test_dynamic_dimension_without_a_profile(tmp_path: Path) -> None:
    text = "g (float[batch, 3, height, 64] image) => (float[batch, 3, height, 64] y) { y = MatMul(image, w) }"
    onnx.save(parsed(text, {"w": (64, 64)}), tmp_path / "image.onnx")
    result = build(tmp_path / "image.onnx", "--kinds", "linear")
    assert_failed(result, errors.USAGE, "dimension 2 (height)", "--max-shapes image:")


def test_width_that_is_no_multiple_of_16(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> None:
    model = save_gated_mlps(tmp_path / "odd.onnx", hidden=40, intermediate=72)
    result = build(model, "--require", "nvfp4")
    assert_failed(result, errors.VERIFICATION_FAILED, "--require nvfp4 cannot be met", "multiple of 16")
    assert not leftovers(tmp_path)


def test_plan_that_names_a_node_that_is_gone(gated_mlps: Path) -> None:
    assert build(gated_mlps, "--stop-after", "plan").exit_code == 0
    path = gated_mlps.parent / "out" / "o.plan.yaml"
    plan = yaml.safe_load(path.read_text())
    plan["subgraphs"][0]["nodes"][0] = "renamed_node"
    path.write_text(yaml.safe_dump(plan))
    assert_failed(build(gated_mlps, "--plan", str(path)), errors.USAGE, "renamed_node")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"y": np.ones((4, 64), np.float16)}, "['x']"),
        ({"x": np.ones((4, 32), np.float16)}, "[4, 32]"),
        ({"x": np.ones((4, 64), np.float32)}, "float16"),
        ({"x": np.full((4, 64), np.nan, np.float16)}, "nan"),
        ({"x": np.ones((0, 64), np.float16)}, "is empty"),
    ],
    ids=["name", "shape", "type", "NaN", "empty"],
)
def test_calibration_data_at_fault(gated_mlps: Path, arrays: dict[str, np.ndarray], text: str) -> None:
    data = gated_mlps.parent / "samples.npz"
    np.savez(data, **arrays)
    assert_failed(build(gated_mlps, "--calib-data", str(data)), errors.USAGE, "samples.npz", text)
    assert not leftovers(gated_mlps.parent)


def test_samples_of_zeros_are_warned_of(gated_mlps: Path) -> None:
    np.savez(gated_mlps.parent / "samples.npz", x=np.zeros((4, 64), np.float16))
    samples = str(gated_mlps.parent / "samples.npz")
    shown = build(gated_mlps, "--calib-data", samples, "--stop-after", "calibrate", "--json")
    assert shown.exit_code == 0, shown.output
    (warning,) = yaml.safe_load(shown.stdout)["warnings"]
    assert "the samples leave 4 of 4 tensors at 0 (x, ...)" in warning


def test_samples_beyond_float16_are_warned_of(gated_mlps: Path, rng: np.random.Generator) -> None:
    """The product of gate and up is, though x is not; ONNX Runtime computes it in float32."""
    samples = gated_mlps.parent / "samples.npz"
    np.savez(samples, x=(3000 * rng.standard_normal((4, 64))).astype(np.float16))
    shown = build(gated_mlps, "--calib-data", str(samples), "--stop-after", "calibrate", "--json")
    assert shown.exit_code == 0, shown.output
    (warning,) = yaml.safe_load(shown.stdout)["warnings"]
    assert re.search(r"take \d of 4 tensors beyond 65504, float16's largest \(\S+ to .*e\+0\d, \.\.\.\)", warning)


def test_unknown_target_lists_the_known(gated_mlps: Path) -> None:
    assert_failed(build(gated_mlps, target="gb300"), errors.USAGE, "'gb300'", "rtx-blackwell", "thor")


@pytest.mark.parametrize("target", ["b200", "thor", "h100"])
def test_target_that_needs_another_machine(gated_mlps: Path, target: str) -> None:
    assert_failed(build(gated_mlps, target=target), errors.UNAVAILABLE, target, "--bundle DIR")
    assert not (gated_mlps.parent / "out" / "o.plan.yaml").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--min-shapes", "x=1"], "--min-shapes"),
        (["--max-shapes", "z:1x64"], "no input 'z'"),
        (["--precision", "int4"], "int4"),
        (["--stop-after", "lunch"], "lunch"),
    ],
)
def test_usage(gated_mlps: Path, options: list[str], text: str) -> None:
    result = build(gated_mlps, *options)
    assert result.exit_code == errors.USAGE, result.output
    assert text in result.stderr


def test_nowhere_to_write(gated_mlps: Path) -> None:
    result = CliRunner().invoke(app, [str(gated_mlps), "--target", "rtx-blackwell"])
    assert_failed(result, errors.USAGE, "-o OUT.engine")


def test_read_only_output_directory(gated_mlps: Path, tmp_path: Path) -> None:
    # Root may write to any folder but those of the kernel.
    folder = Path("/sys") if os.geteuid() == 0 else tmp_path / "read-only"
    if folder != Path("/sys"):
        folder.mkdir(mode=0o555)
    options = [str(gated_mlps), "-o", str(folder / "o.engine"), "--target", "rtx-blackwell"]
    assert_failed(CliRunner().invoke(app, options), errors.BUILD_FAILED, f"{folder}: ", "-o")


@pytest.mark.parametrize(("below", "text"), [("", "is not a folder"), ("deeper", "above it is a file")])
def test_output_below_a_file(gated_mlps: Path, tmp_path: Path, below: str, text: str) -> None:
    file = tmp_path / "file"
    file.touch()
    options = [str(gated_mlps), "-o", str(file / below / "o.engine"), "--target", "rtx-blackwell"]
    assert_failed(CliRunner().invoke(app, options), errors.BUILD_FAILED, str(file / below), text)


def test_disk_full_says_so(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, destination: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))

    monkeypatch.setattr("trt_nvfp4.builder.pipeline.build_step.os.replace", full)
    assert_failed(build(gated_mlps), errors.BUILD_FAILED, "No space left on device", "free some space")
    monkeypatch.undo()
    assert not leftovers(gated_mlps.parent)


def test_disk_full_of_a_copy_names_the_copy(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, destination: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(destination))

    monkeypatch.setattr("trt_nvfp4.builder.tensorrt.bundle.link_or_copy", full)
    failed = build(gated_mlps)
    assert_failed(failed, errors.BUILD_FAILED, f"error: {gated_mlps.parent / 'out' / '.trt-nvfp4-'}", "free some space")


def test_no_room_for_the_engine(gated_mlps: Path) -> None:
    """The build script's own write fails: no file may grow beyond a megabyte, and the engine is larger."""
    build_library("sm_120a", groups={"mlp", "w4a16"})  # compiled before, without the limit
    output = gated_mlps.parent / "out" / "o.engine"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(gated_mlps), "-o", str(output), "--target", "rtx-blackwell"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == errors.BUILD_FAILED, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not leftovers(output.parent)


def test_too_little_memory(gated_mlps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr("trt_nvfp4.builder.tensorrt.build_process.psutil.virtual_memory", lambda: free)
    assert_failed(build(gated_mlps), errors.BUILD_FAILED, "of memory", "1.0 kB are free")
    assert not leftovers(gated_mlps.parent / "out")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rewrite", "build"])
def test_interrupt_leaves_nothing(tmp_path: Path, save_gated_mlps: Callable[..., Path], stage: str) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", hidden=1024, intermediate=4096)
    output = tmp_path / "out" / "o.engine"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(model), "-o", str(output), "--target", "rtx-blackwell"],
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # The plan is written just before the rewrite; the build works in a hidden folder.
    begun = "o.plan.yaml" if stage == "rewrite" else ".trt-nvfp4-*/bundle/manifest.json"
    deadline = time.monotonic() + 120
    while not list(output.parent.glob(begun)):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == errors.INTERRUPTED, message
    assert "interrupted" in message
    assert "Traceback" not in message
    assert not leftovers(output.parent)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(output.parent) in " ".join(p.info["cmdline"] or [])]


def test_debug_shows_the_traceback(gated_mlps: Path) -> None:
    gated_mlps.unlink()
    result = build(gated_mlps, "--debug")
    assert result.exit_code == 1
    assert result.exception is not None
    assert "no such file" in str(result.exception)
