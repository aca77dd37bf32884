"""The build script, run by TensorRT-RTX for SM120 on the CPU."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from trt_nvfp4.builder import backend, bundle
from trt_nvfp4.builder.engine import estimate_memory, run_script
from trt_nvfp4.builder.errors import (
    BUILD_FAILED,
    MODEL_AT_FAULT,
    UNAVAILABLE,
    USAGE,
    VERIFICATION_FAILED,
    BuilderError,
)
from trt_nvfp4.builder.shapes import Profile
from trt_nvfp4.builder.targets import find_target

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")

PROFILES = {"x": Profile((1, 64), (4, 64), (8, 64))}


def folder_of(
    tmp_path: Path, model: Path, planned: list[dict[str, Any]], profiles: dict[str, Profile] = PROFILES, **options: Any
) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    bundle.write_folder(folder, find_target("rtx-blackwell"), model, planned, profiles, None, **options)
    return folder


def carried(name: str, decision: str, *nodes: str) -> dict[str, Any]:
    return {"name": name, "decision": decision, "engine_nodes": list(nodes)}


def test_engine_is_built_and_checked(tmp_path: Path, fp8_and_bf16: Path) -> None:
    planned = [carried("first", "fp8", "mm8"), carried("second", "bf16", "mm16")]
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


def test_another_precision_than_planned_fails_and_leaves_no_engine(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [carried("second", "fp8", "mm16")])
    with pytest.raises(BuilderError, match="second: node 'mm16': expected a layer that reads fp8") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == VERIFICATION_FAILED
    assert not list(tmp_path.glob("*.engine"))
    assert not list(tmp_path.glob(".*"))


def test_external_data_travels_under_the_folders_own_names(tmp_path: Path, gated_mlps: Path) -> None:
    planned = [carried("mlp", "fp16", "up_proj0", "down_proj1")]
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
    with pytest.raises(BuilderError, match=r"'the_node'.*Strange") as failure:
        run_script(folder_of(tmp_path, tmp_path / "strange.onnx", []), tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == MODEL_AT_FAULT


def test_missing_profile_is_reported(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], profiles={})
    with pytest.raises(BuilderError, match="TensorRT built no engine") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == BUILD_FAILED


def test_changed_file_of_a_bundle_is_found(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], keep=True)
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(BuilderError, match=r"model\.onnx: missing or changed") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("change", "text", "code"),
    [
        ({"compute_capability": [9, 0]}, "builds no engine for SM90", UNAVAILABLE),
        ({"modules": {"tensorrt_rtx": "999.0"}}, "too old", UNAVAILABLE),
        ({"modules": {"no_such_tensorrt": "1.0"}}, "cannot import no_such_tensorrt", UNAVAILABLE),
        ({"profiles": 3}, "not a manifest", USAGE),
    ],
)
def test_manifest_that_cannot_be_carried_out(
    tmp_path: Path, fp8_and_bf16: Path, change: dict[str, Any], text: str, code: int
) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    manifest = folder / bundle.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(BuilderError, match=text) as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == code


def test_script_that_dies_is_reported(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [])
    (folder / bundle.SCRIPT).write_text("import os\nprint('last words', flush=True)\nos.abort()\n")
    with pytest.raises(BuilderError, match="SIGABRT: last words") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == BUILD_FAILED


def test_memory_estimate_counts_external_data(gated_mlps: Path) -> None:
    data = gated_mlps.with_name("model.onnx.data").stat().st_size
    estimate = estimate_memory(gated_mlps)
    assert estimate.weights == gated_mlps.stat().st_size + data
    assert estimate.needed > 2 * estimate.weights
    assert estimate.fits


def test_replacing_leaves_nothing_when_interrupted(tmp_path: Path) -> None:
    destination = tmp_path / "file"
    destination.write_text("old")

    def interrupted() -> None:
        with backend.replacing(destination) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert destination.read_text() == "old"
    assert list(tmp_path.iterdir()) == [destination]


def test_a_write_that_fails_names_the_destination(tmp_path: Path) -> None:
    def full() -> None:
        with backend.replacing(tmp_path / "file"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space") as failure:
        full()
    assert backend.describe(failure.value).startswith(f"{tmp_path / 'file'}: No space left on device; free some space")


def test_messages_name_the_users_files(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float16[2, 8] x, int64[2] sizes) => (float16[a, b] y) { y = Reshape(x, sizes) }""")
    onnx.save(model, tmp_path / "mine.onnx")
    folder = folder_of(tmp_path, tmp_path / "mine.onnx", [], {})
    names = {folder / "model.onnx": tmp_path / "mine.onnx"}
    with pytest.raises(BuilderError, match=r"/mine\.onnx: the values of input 'sizes' are a shape") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None, names)
    assert failure.value.exit_code == MODEL_AT_FAULT


def test_shape_that_tensorrt_refuses(tmp_path: Path, fp8_and_bf16: Path) -> None:
    folder = folder_of(tmp_path, fp8_and_bf16, [], {"x": Profile((1, 64), (1, 64), (3 * 10**9, 64))})
    with pytest.raises(BuilderError, match=r"TensorRT refused the shapes .* of 'x'") as failure:
        run_script(folder, tmp_path / "out.engine", lambda event: None)
    assert failure.value.exit_code == USAGE
