"""What is given as a model and is none is named, with what to give instead."""

import subprocess
import sys
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


_WITHOUT_TORCH = """
import importlib, sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "onnx", "numpy")))
from click.testing import CliRunner
name, *arguments = sys.argv[1:]
ran = CliRunner().invoke(importlib.import_module(f"trt_nvfp4.builder.cli.{name}").app, arguments)
sys.exit(f"{ran.exit_code} {ran.output}")
"""


@pytest.mark.parametrize("command", ["build_engine -o o.engine --target thor", "generate --prompt a", "serve"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not JSON"),
        ("{}", "no model_type"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000}', "num_hidden_layers is 1000000"),
        ('{"_diffusers_version": "0.1"}', "one module of a diffusers pipeline"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}', "build-engine MODEL --draft"),
    ],
)
def test_a_configuration_before_slow_imports(tmp_path: Path, command: str, config: str, words: str) -> None:
    (tmp_path / "config.json").write_text(config)
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, name, tmp_path, *options], capture_output=True, text=True
    )
    assert done.stderr.startswith(f"{MODEL_AT_FAULT} error: {tmp_path}"), done.stderr
    assert words in " ".join(done.stderr.split())
