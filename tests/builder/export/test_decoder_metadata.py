"""The metadata of a decoder's caches come from anybody: values that no decoder has are refused, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export.decoder_contract import DECODER, Decoder, decoder_of
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer


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
        {"tokenizer": "../../.ssh"},
        {"tokenizer": "/etc"},
        {"tokenizer": 1},
        {"layers": 3},
        {"version": 9},
    ],
)
def test_values_that_no_decoder_has(changed: dict[str, Any]) -> None:
    with pytest.raises(BuilderError, match=r"metadata entry .* cannot be read .*; export the model again") as failure:
        Decoder.parse(stated(**changed))
    assert failure.value.exit_code == MODEL_AT_FAULT
    Decoder.parse(stated())


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
    with pytest.raises(BuilderError, match=r"tokenizer.json lies outside the model's folder") as failure:
        copy_tokenizer(folder, tmp_path / "copy")
    assert failure.value.exit_code == MODEL_AT_FAULT
    assert not (tmp_path / "copy").exists()
