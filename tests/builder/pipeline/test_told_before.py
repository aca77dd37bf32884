"""What can be known before an export or a quantization is said before it, and leaves no file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import helper, numpy_helper
from typer.testing import CliRunner

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.export import huggingface

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")


def build(model: Path, *options: str) -> Result:
    """Into `out/` beside the model."""
    output = model.parent / "out" / "o.engine"
    return CliRunner().invoke(app, [str(model), "-o", str(output), "--target", "rtx-blackwell", *options])


def assert_told(result: Result, code: int, text: str, model: Path) -> None:
    assert result.exit_code == code, result.output
    assert text in " ".join(result.stderr.split())
    assert not (model.parent / "out").exists()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model's directory that nothing exports."""

    def export(*_: object) -> Path:
        raise AssertionError("exported")

    monkeypatch.setattr(huggingface, "export", export)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("option", ["--calib-data", "--accuracy-data"])
def test_text_without_words_before_an_export(directory: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "text.txt").write_text(" \n\n")
    (tmp_path / "good.npz").write_bytes(b"")
    more = ["--accuracy-budget", "cosine>=0.9", "--calib-data", str(tmp_path / "good.npz")]
    options = more * (option == "--accuracy-data")
    result = build(directory, option, str(tmp_path / "text.txt"), *options)
    assert_told(result, errors.USAGE, "text.txt: holds no text", directory)


def test_a_missing_tokenizer_before_an_export(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words.\n")
    result = build(directory, "--calib-data", str(tmp_path / "text.txt"))
    assert_told(result, errors.USAGE, "tokenizer", directory)


def test_no_compiler_before_anything_is_quantized(
    gated_mlps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(tmp_path / "no-nvcc"))
    assert_told(build(gated_mlps), errors.UNAVAILABLE, "no-nvcc", gated_mlps)


def test_nothing_to_replace_before_shapes_are_asked_for(tmp_path: Path) -> None:
    """A convolution whose height nobody gave."""
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, "height", "width"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [weight],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    assert_told(build(path), errors.MODEL_AT_FAULT, "1 convolutions stay as they are: no Conv is replaced", path)
