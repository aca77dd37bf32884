"""What is given as a model and is none is named, with what to give instead."""

from pathlib import Path

import onnx
import pytest
import torch
from command_lines import invoked

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.model.model_files import check_model_file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"GGUF\x03", "a model of llama.cpp; give the Hugging Face directory"),
        ("renamed.onnx", b"GGUF\x03", "a model of llama.cpp"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "give the folder that it lies in, with config.json"),
        ("model.engine", b"ftrt", "an engine of TensorRT; give the ONNX file"),
        ("model.tflite", b"TFL3", "a model of TensorFlow"),
    ],
)
def test_other_formats(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    invoked(
        app,
        [path, "-o", tmp_path / "o.engine", "--target", "ada"],
        MODEL_AT_FAULT,
        f"{name}: not an ONNX file, but ",
        message,
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoints_of_torch(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.onnx", _use_new_zipfile_serialization=zipped)
    with pytest.raises(BuilderError, match=r"a checkpoint of PyTorch.*torch\.onnx\.export"):
        check_model_file(tmp_path / "model.onnx")


def test_onnx_by_any_name(tmp_path: Path) -> None:
    for name in ("model.onnx", "model.pt", "model.bin", "model"):
        onnx.save(mlp_model(spec())[0], tmp_path / name)
        check_model_file(tmp_path / name)
    check_model_file(tmp_path)
    check_model_file(Path("model.py:components"))


def test_a_name_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir DIR"):
        check_model_file(Path("Qwen/Qwen3-0.6B"))
    with pytest.raises(BuilderError, match=r"gone\.onnx: no such file or folder$"):
        check_model_file(Path("models/gone.onnx"))


@pytest.mark.parametrize("given", ["modle.onnx", "model.onx", "Model.onnx", "exprt", "sub/model.onnx"])
def test_names_with_a_slip(given: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    (tmp_path / "export").mkdir()
    meant = {"exprt": "export", "sub/model.onnx": None}.get(given, "model.onnx")
    ending = "no such file or folder" if meant is None else f"; did you mean {tmp_path / meant}?"
    with pytest.raises(BuilderError) as failure:
        check_model_file(tmp_path / given)
    assert str(failure.value).endswith(ending)
