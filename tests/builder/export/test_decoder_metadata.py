"""The metadata of a decoder's caches come from anybody: values that no decoder has are refused, whatever they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import DECODER, Decoder, decoder_of


def stated(**changed: Any) -> str:
    return json.dumps({**json.loads(TinyDecoder(np.random.default_rng(0)).decoder.json()), **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"capacity": 0},
        {"capacity": 1 << 70},
        {"capacity": "24"},
        {"max_batch": True},
        {"vocab_size": None},
        {"kv_heads": 2},
        {"kv_heads": ["x"]},
        {"kv_heads": [], "head_dim": [], "value_head_dim": [], "layers": 0},
        {"head_dim": [8, 8]},
        {"value_head_dim": [8.0]},
        {"eos_token_ids": 3},
        {"eos_token_ids": ["</s>"]},
        {"cache_dtype": 1},
        {"tokens": None},
        {"fp8_caches": [1]},
        {"stacked": [[0, 10**12]]},
        {"stacked": [[0]]},
        {"stacked": 3},
        {"sliding_window": "x"},
        {"states": [{"name": "0.conv", "shape": [4, 0], "dtype": "float32"}]},
        {"states": [{"name": "../x", "shape": [4], "dtype": "float32"}]},
        {"states": [{"name": "0.conv", "shape": 4, "dtype": "float32"}]},
        {"states": [{"name": "0.conv"}]},
        {"states": 1},
        {"hidden_size": -1},
        {"takes_hidden": True},
        {"takes_hidden": "yes", "hidden_size": 8},
        {"tokenizer": "../../.ssh"},
        {"tokenizer": "/etc"},
        {"tokenizer": 1},
        {"layers": 3},
        {"version": 9},
    ],
)
def test_values_that_no_decoder_has(changed: dict[str, Any]) -> None:
    with pytest.raises(ModelFaultError, match=r"metadata entry .* cannot be read .*; export the model again"):
        Decoder.parse(stated(**changed))
    Decoder.parse(stated())


def test_a_head_that_drafts() -> None:
    decoder = Decoder.parse(stated(hidden_size=8, takes_hidden=True))
    assert decoder.hidden_size == 8
    assert decoder.takes_hidden
    assert Decoder.parse(decoder.json()) == decoder


def test_names_of_inputs(tmp_path: Path) -> None:
    model = onnx.load(TinyDecoder(np.random.default_rng(0)).save(tmp_path / "m.onnx"))
    model.graph.input[-1].name = "past_key_values.0-99999999999"
    with pytest.raises(BuilderError, match=f"an input's name does not fit the metadata {DECODER}: .*99999999999"):
        decoder_of(model)


def test_tokenizer_files_that_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    (folder := tmp_path / "tokenizer").mkdir()
    (folder / "vocab.txt").write_text("a")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFaultError, match=r"tokenizer.json lies outside the model's folder"):
        copy_tokenizer(folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
