"""compare-engine and bench-engine on a Hugging Face directory, to their ends."""

import json
from contextlib import ExitStack
from pathlib import Path

import onnxruntime
import pytest
from bench_stand_ins import CpuDevice
from command_lines import invoked

pytest.importorskip("transformers")

from onnx_models.small_decoders import saved
from trt_nvfp4.builder.bench.original import with_original
from trt_nvfp4.builder.bench.subject import Request as BenchRequest
from trt_nvfp4.builder.cli import bench_engine, compare_engine
from trt_nvfp4.builder.cuda import driver
from trt_nvfp4.builder.errors import USAGE
from trt_nvfp4.builder.export import deferred, torch_module
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions, decoder_of
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import TARGETS, find_target
from trt_nvfp4.builder.terminal.progress import Silent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    saved("llama", folder, 0)
    return folder


def test_a_directory_is_compared_with_a_model_of_it(directory: Path, tmp_path: Path) -> None:
    model = export(directory, tmp_path / "m.onnx", "auto", CacheOptions(max_batch=4))
    ran = invoked(compare_engine.app, [directory, model, "--json"])
    found = json.loads(ran.stdout)
    assert (found["reference"], found["result"]) == (str(directory), str(model))
    assert len(found["steps"]) == compare_engine.STEPS
    assert (found["top1"], found["kl"]) == (1.0, pytest.approx(0, abs=1e-9))


@pytest.mark.skipif(driver.local_compute_capability() is not None, reason="there is a GPU")
def test_a_directory_is_predicted_without_a_gpu(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.bench.json"
    invoked(bench_engine.app, [directory, "--target", "rtx-blackwell", "-o", out])
    found = json.loads(out.read_text())
    assert (found["mode"], found["model"]) == ("roofline", str(directory))
    assert "predicted" in found["label"]
    assert [step["phase"] for step in found["steps"]] == ["prompt", "step", "step", "step"]


@pytest.fixture
def engine(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside it what a build by reference leaves, which has no ONNX file of the original; it is not run itself. The
    directory is named from a folder that is not the current one later."""
    monkeypatch.setattr(torch_module, "EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr(deferred, "SMALL", 0)
    output = tmp_path / "o.engine"
    target = find_target("rtx-blackwell")
    monkeypatch.chdir(directory.parent)
    named = Path(directory.name)
    pipeline.run(Request(named, target, output, cache_capacity=24, max_batch=2, stop_after="rewrite"))
    monkeypatch.chdir(tmp_path)
    output.write_bytes(b"?")
    assert not output.with_suffix(".onnx").exists()
    return output


@pytest.mark.skipif(driver.local_compute_capability() is not None, reason="there is a GPU")
def test_an_engine_built_by_reference_is_predicted_from_its_directory(
    directory: Path, engine: Path, tmp_path: Path
) -> None:
    model = export(directory, tmp_path / "m.onnx", "generate", CacheOptions(24, 2))
    found = []
    for options in ([], ["--model", str(model)]):
        ran = invoked(bench_engine.app, [engine, *options, "--json"])
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1]
    assert [step["phase"] for step in found[0]["steps"]] == ["prompt", "step", "step", "step"]


def test_baselines_of_an_engine_built_by_reference_have_its_weights(
    directory: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where engines can be built to compare with."""
    monkeypatch.setattr(driver, "local_compute_capability", lambda: (12, 0))
    with ExitStack() as made:
        found = with_original(BenchRequest(engine), made, Silent(), CpuDevice)
        assert found.model is not None
        decoder = decoder_of(read(found.model))
        assert decoder is not None
        assert (decoder.capacity, decoder.max_batch) == (24, 2)
        onnxruntime.InferenceSession(found.model)
    assert not found.model.exists()


def test_reports_that_do_not_say_how_a_directory_was_exported(engine: Path) -> None:
    file = engine.with_suffix(".report.json")
    report = json.loads(file.read_text())
    for exported in (None, {"task": "generate"}, {**report["exported"], "max_batch": "two"}):
        file.write_text(json.dumps({**report, "exported": exported}))
        invoked(
            bench_engine.app, [engine], USAGE, "does not say how it was exported: build again, or give --model FILE"
        )


@pytest.mark.skipif(driver.local_compute_capability() is not None, reason="there is a GPU")
@pytest.mark.parametrize(("options", "words"), [([], "add --target NAME"), (["--target", "none"], next(iter(TARGETS)))])
def test_a_target_is_asked_for_before_the_export(directory: Path, options: list[str], words: str) -> None:
    ran = invoked(bench_engine.app, [directory, *options], USAGE, words)
    assert "exporting" not in ran.stderr
