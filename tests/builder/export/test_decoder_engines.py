"""Engines of small decoders for a GPU that is not here: one plugin layer per planned subgraph, caches in place."""

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
pytest.importorskip("transformers")

from onnx_models.small_decoders import saved
from trt_nvfp4.builder.export import torch_module
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target

# Who computes attention.
ATTENTION = {
    "llama": "attention plugin",  # with FP8 weights, which TensorRT reads in each of its two profiles
    "gpt_oss": "attention plugin",
    "qwen3": "attention plugin",
    "deepseek_v3": "as in the model",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ATTENTION)
def test_engines_hold_what_is_planned(family: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "qwen3":  # with weights and tables in a file of their own, as large models have them
        monkeypatch.setattr(torch_module, "EXTERNAL_DATA_BYTES", 0)
    saved(family, tmp_path / family, seed)
    target, output = find_target("rtx-blackwell"), tmp_path / "o.engine"
    precision = "fp8" if family == "llama" else "auto"
    report = pipeline.run(pipeline.Request(tmp_path / family, target, output, max_batch=2, precision=precision))
    assert (tmp_path / "o.onnx.data").is_file() == (family == "qwen3")
    decoder = decoder_of(read(tmp_path / "o.rewritten.onnx"))
    assert decoder is not None
    assert report.plugin_layers == sum("plugin" in entry["realized"] for entry in report.subgraphs)
    assert report.caches_in_place == 2 * decoder.layers
    attention = [entry["realized"] for entry in report.subgraphs if entry["kind"] == "attention"]
    assert attention == [ATTENTION[family]] * decoder.layers
    joined = [entry for entry in report.subgraphs if entry["name"].endswith("self_attn")]  # Q, K and V, or their parts
    linear = "fp8" if family == "llama" else "nvfp4 plugin"
    assert [(entry["kind"], entry["realized"]) for entry in joined] == [("linear", linear)] * decoder.layers
    assert report.network["type"] == "bf16"
