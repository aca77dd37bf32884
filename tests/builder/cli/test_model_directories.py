"""compare-engine and bench-engine on a Hugging Face directory, to their ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from onnx_models.small_decoders import saved
from trt_nvfp4.builder.cli import bench_engine, compare_engine
from trt_nvfp4.builder.errors import USAGE
from trt_nvfp4.builder.export.decoder_contract import CacheOptions
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.builder.tensorrt import backend


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    saved("llama", folder, 0)
    return folder


def test_a_directory_is_compared_with_a_model_of_it(directory: Path, tmp_path: Path) -> None:
    model = export(directory, tmp_path / "m.onnx", "auto", CacheOptions(max_batch=4))
    ran = CliRunner().invoke(compare_engine.app, [str(directory), str(model), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["reference"], found["result"]) == (str(directory), str(model))
    assert len(found["steps"]) == compare_engine.STEPS
    assert (found["top1"], found["kl"]) == (1.0, pytest.approx(0, abs=1e-9))


@pytest.mark.skipif(backend.local_compute_capability() is not None, reason="there is a GPU")
def test_a_directory_is_predicted_without_a_gpu(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.bench.json"
    ran = CliRunner().invoke(bench_engine.app, [str(directory), "--target", "rtx-blackwell", "-o", str(out)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    assert (found["mode"], found["model"]) == ("roofline", str(directory))
    assert "predicted" in found["label"]
    assert [step["phase"] for step in found["steps"]] == ["prompt", "step", "step", "step"]


@pytest.mark.skipif(backend.local_compute_capability() is not None, reason="there is a GPU")
@pytest.mark.parametrize(("options", "words"), [([], "add --target NAME"), (["--target", "none"], next(iter(TARGETS)))])
def test_a_target_is_asked_for_before_the_export(directory: Path, options: list[str], words: str) -> None:
    ran = CliRunner().invoke(bench_engine.app, [str(directory), *options])
    assert ran.exit_code == USAGE
    assert words in " ".join(ran.stderr.split())
    assert "exporting" not in ran.stderr
