"""Names of the Hugging Face Hub: what is downloaded, and what is said where nothing can be."""

from pathlib import Path
from typing import Any

import pytest

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.hub import local_model

hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "cache"))


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.append((name, options)))
    said: list[str] = []
    folder = tmp_path / "cache" / "models" / "Org" / "Model-0.6B"
    assert local_model(Path("Org/Model-0.6B"), said.append) == folder
    assert said == [f"downloading Org/Model-0.6B from the Hugging Face Hub to {folder}"]
    ((name, options),) = asked
    assert (name, options["local_dir"]) == ("Org/Model-0.6B", folder)
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(options["allow_patterns"])


@pytest.mark.parametrize(
    "name", ["model", "model.onnx", "org/model.onnx", "here/model", "a/b/c", "../a", "org/..", "/o/m"]
)
def test_paths_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("downloads"))
    Path("here").mkdir()
    assert local_model(Path(name), print) == Path(name)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("no"), "cannot be reached .offline.*hf download org/m --local-dir DIR"),
        (OSError(28, "No space left on device"), "failed .*No space left on device.*; the same command goes on"),
    ],
)
def test_what_cannot_be_downloaded(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fails)
    with pytest.raises(ModelFaultError, match=f"org/m: no such file or folder; .*{message}"):
        local_model(Path("org/m"), print)
