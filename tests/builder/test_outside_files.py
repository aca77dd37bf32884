"""Nothing that a rewritten model, a checkpoint, a directory or a bundle names is read outside its own folder."""

import json
import shutil
from pathlib import Path

import onnx
import pytest

from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.builder.report import inspection
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.tensorrt import build_script, bundle
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.common.errors import CalibrationError

OUTSIDE = "outside the model's folder"


@pytest.mark.parametrize("location", ["../secret", "/dev/zero", "link", "missing"])
def test_a_rewritten_model(tmp_path: Path, gated_mlps: Path, location: str) -> None:
    model = tmp_path / "in" / "o.engine"
    pipeline.run(pipeline.Request(gated_mlps, find_target("ada"), model, precision="nvfp4", stop_after="rewrite"))
    rewritten = model.with_name("o.rewritten.onnx")
    data = rewritten.with_name("o.rewritten.onnx.data")
    shutil.copyfile(data, tmp_path / "secret")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
    proto = onnx.load(rewritten, load_external_data=False)
    (tensor, *_) = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    (entry,) = [entry for entry in tensor.external_data if entry.key == "location"]
    entry.value = location
    onnx.save(proto, rewritten)
    plan = model.with_name("o.plan.yaml")
    with pytest.raises(ModelFaultError, match=OUTSIDE if location != "missing" else "is missing"):
        pipeline.run(pipeline.Request(rewritten, find_target("ada"), plan=plan, bundle=tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()


def test_a_checkpoint_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CalibrationError, match=OUTSIDE):
        NVFP4Checkpoint(folder)
    with pytest.raises(BuilderError, match=OUTSIDE):
        export.export(folder, tmp_path / "m.onnx")
    (folder / "model.safetensors.index.json").unlink()
    for name in ("model.safetensors", "tokenizer.model", "chat_template.jinja"):
        (folder / name).symlink_to("../secret.safetensors")
        with pytest.raises(BuilderError, match=f"{name} lies {OUTSIDE}"):
            export.export(folder, tmp_path / "m.onnx")
        (folder / name).unlink()


def test_a_bundles_manifest(tmp_path: Path) -> None:
    manifest = {"target": "ada", "arch": "sm_89", "modules": {}, "profiles": [], "checksums": {"/dev/zero": "0"}}
    manifest |= {"model": "../m.onnx", "planned": [], "plugin_library": None, "plugin_sources": None}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BuilderError, match=OUTSIDE):
        inspection.inspect(tmp_path)


@pytest.mark.parametrize("key", ["engine", "model", "plugin_library", "plugin_sources", "timing_cache", "checksums"])
@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_what_a_bundles_script_reads_and_writes(key: str, name: str, tmp_path: Path, gated_mlps: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundle.write_folder(folder, find_target("ada"), gated_mlps, [], [{}])
    manifest = folder / MANIFEST
    named = {name: "0"} if key == "checksums" else name
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {key: named}))
    with pytest.raises(BuilderError, match="lies outside of its folder"):
        build_script.read_job(manifest, None)


def test_a_bundles_modules_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gated_mlps: Path) -> None:
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bundle").mkdir()
    manifest = bundle.write_folder(tmp_path / "bundle", find_target("ada"), gated_mlps, [], [{}])
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"modules": {"hostile.part": "1.0"}}))
    with pytest.raises(BuilderError, match=r"'hostile\.part' is not a TensorRT module"):
        build_script.read_job(manifest, None)
    assert not (tmp_path / "ran").exists()


def test_a_reports_backend_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "m.engine").write_bytes(b"engine")
    (tmp_path / "m.report.json").write_text('{"backend": "hostile"}')
    with pytest.raises(BuilderError, match="needs TensorRT"):
        runtime.load_engine(tmp_path / "m.engine")
    assert not (tmp_path / "ran").exists()
