"""A model and its drafter: two engines, a bundle in a bundle, and drafters that do not fit."""

import json
from pathlib import Path

import onnx
import pytest
from draft_heads import VOCABULARY, WIDTH, llama, write_eagle, write_mtp

import trt_nvfp4
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.model.decoder_contract import Decoder, decoder_of


@pytest.mark.slow
def test_engines_of_a_model_and_its_eagle_head(tmp_path: Path) -> None:
    write_eagle(llama(tmp_path / "model"), tmp_path / "head")
    made = trt_nvfp4.build(
        tmp_path / "model", "rtx-blackwell", tmp_path / "t.engine", draft=tmp_path / "head", cache_capacity=32
    )
    assert made.files["drafter"] == tmp_path / "t.draft.engine"
    for name, takes in (("t", False), ("t.draft", True)):
        assert (tmp_path / f"{name}.engine").stat().st_size
        report = json.loads((tmp_path / f"{name}.report.json").read_text())
        plugins = {entry["realized"] for entry in report["subgraphs"] if entry["kind"] != "decoder"}
        assert plugins == {"nvfp4 plugin", "attention plugin"}, name
        decoder = decoder_of(onnx.load(tmp_path / f"{name}.rewritten.onnx", load_external_data=False))
        assert decoder is not None
        assert (decoder.hidden_size, decoder.takes_hidden, decoder.vocab_size) == (WIDTH, takes, VOCABULARY)
    assert json.loads((tmp_path / "t.report.json").read_text())["exported"]["draft"] == str(tmp_path / "head")


@pytest.mark.slow
def test_bundle_with_the_head_of_a_checkpoint(tmp_path: Path) -> None:
    write_mtp("mimo", tmp_path / "model")
    trt_nvfp4.build(tmp_path / "model", "thor", bundle=tmp_path / "bundle", draft="auto", cache_capacity=32)
    for folder, takes in ((tmp_path / "bundle", False), (tmp_path / "bundle" / "draft", True)):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert Decoder.parse(json.dumps(manifest["decoder"])).takes_hidden is takes
        assert (folder / "model.onnx").is_file()
        assert (folder / "build_engine.py").is_file()


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ("missing", {}, "neither an EAGLE-3 head nor a language model"),
        ("other", {}, "it knows 128 tokens and the model 96; give one with the same tokenizer"),
        ("tokens", {}, "token 1 is 'c' in .*tokens/tokenizer.json and 'b' in .*; give a model with the same tokenizer"),
        ("auto", {"task": "features"}, "--draft auto"),
        ("auto", {}, "has no layers that predict further tokens"),
    ],
)
def test_drafters_that_do_not_fit(draft: str, options: dict[str, str], says: str, tmp_path: Path) -> None:
    llama(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name, size, words in (("model", 96, "abc"), ("other", 128, "abc"), ("tokens", 96, "acb")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        vocabulary = {"model": {"vocab": {word: at for at, word in enumerate(words)}}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(vocabulary))
    given = draft if draft == "auto" else tmp_path / draft
    with pytest.raises(BuilderError, match=says):
        trt_nvfp4.build(tmp_path / "model", "rtx-blackwell", tmp_path / "o" / "t.engine", draft=given, **options)
    assert not (tmp_path / "o").exists()
