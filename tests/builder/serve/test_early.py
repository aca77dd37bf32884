"""Wrong options are refused before a model is opened."""

import os
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.generator import Generator
from trt_nvfp4.builder.serve.guard import read_keys
from trt_nvfp4.builder.serve.serve_options import ServeOptions
from trt_nvfp4.builder.serve.server import serve


def test_a_drafter_that_is_not_there(tmp_path: Path) -> None:
    model, draft = tmp_path / "none.onnx", str(tmp_path / "head.onnx")
    for run in (lambda: serve(ServeOptions(model=model, draft=draft)), lambda: Generator(model, draft=draft)):
        with pytest.raises(UsageError, match=r"--draft .*head.onnx: no such file or folder; give ngram, none, a head"):
            run()


def test_a_head_that_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(UsageError, match=r"an EAGLE-3 head is built with its model \(build-engine MODEL --draft .*\)"):
        Generator(tmp_path / "none.onnx", draft=tmp_path)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "No such file or directory"),
        (b"", "expected keys in ASCII, one a line"),
        ("schlüssel\n".encode(), "expected keys in ASCII, one a line"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_files_without_keys(written: bytes | None, message: str, tmp_path: Path) -> None:
    if written is not None:
        (tmp_path / "keys").write_bytes(written)
    with pytest.raises(UsageError, match=f"--api-key-file .*keys: .*{message}"):
        serve(ServeOptions(model=tmp_path / "none.onnx", api_key_file=tmp_path / "keys"))


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\n  second \r\n")
    assert read_keys(tmp_path / "keys") == ["first", "second"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not an ordinary file"):
        read_keys(tmp_path / "pipe")
