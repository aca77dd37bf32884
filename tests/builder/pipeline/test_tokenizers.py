"""Every engine keeps its model's tokenizer, whatever else is built into its folder."""

from pathlib import Path

import numpy as np
import pytest

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.generate.open import tokenizer_folder
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target


@pytest.fixture
def models(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    """Three decoders, each with a tokenizer beside it; only the last has a chat template."""
    found = []
    for name in "abc":
        (folder := tmp_path / name / "tokenizer").mkdir(parents=True)
        (folder / "tokenizer.json").write_text(f'"{name}"')
        found.append(TinyDecoder(rng).save(tmp_path / name / "m.onnx"))
    (folder / "chat_template.jinja").write_text("c")
    return found


def built(model: Path, output: Path) -> dict[str, str]:
    """Plan `model` for `output`; returns the files of the tokenizer that an engine there would have."""
    pipeline.run(Request(model, find_target("rtx-blackwell"), output=output, stop_after="plan"))
    return texts(output)


def texts(engine: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in tokenizer_folder(engine).iterdir()}


def test_engines_of_one_folder(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    engines = [out / name for name in ("Qwen2.engine", "Qwen2.5.engine", "x.plan")]
    found = [built(model, engine) for model, engine in zip(models, engines, strict=True)]
    assert [one["tokenizer.json"] for one in found] == ['"a"', '"b"', '"c"']
    assert [texts(engine) for engine in engines] == found
    assert texts(out / "Qwen2.5.rewritten.onnx") == found[1]
    assert tokenizer_folder(engines[0]) == out / "tokenizer"
    # Again, and with another model, whose tokenizer has fewer files.
    assert built(models[0], engines[0]) == found[0]
    assert built(models[1], engines[2]) == found[1]
    assert texts(engines[0]) == found[0]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"tokenizer", "Qwen2.5.tokenizer", "x.tokenizer"}


def test_an_engine_of_a_model_in_the_same_folder(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    built(models[0], out / "a.engine")
    expected = built(models[2], out / "c.engine")
    model = TinyDecoder(np.random.default_rng(0)).save(out / "c.onnx")
    assert built(model, out / "d.engine") == expected
