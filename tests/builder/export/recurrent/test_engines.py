"""Tiny hybrids as engines and bundles: recurrences, caches, linears and experts are built as planned."""

import sys
from pathlib import Path

import onnx
import pytest

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
pytest.importorskip("transformers")

from onnx_models.any_causal_lm import made
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target

sys.path.insert(0, str(Path(__file__).parents[3] / "plugins"))

# How many recurrences each has in its four layers.
RECURRENCES = {
    "Qwen3_5MoeForCausalLM": 3,
    "NemotronHForCausalLM": 1,
    "GraniteMoeHybridForCausalLM": 2,
    "Lfm2ForCausalLM": 0,  # short convolutions
    "FalconH1ForCausalLM": 4,
    "DeepseekV32ForCausalLM": 0,  # keys of indexers
}
FIRST = [
    pytest.param(name, marks=() if name == "Qwen3_5MoeForCausalLM" else pytest.mark.nightly) for name in RECURRENCES
]


def built(name: str, folder: Path, target: str) -> Report:
    made(name).bfloat16().save_pretrained(folder / "m")
    where = {"output": folder / "o.engine"} if target == "rtx-blackwell" else {"bundle": folder / "o"}
    request = pipeline.Request(model=folder / "m", target=find_target(target), max_batch=2, cache_capacity=128, **where)
    return pipeline.run(request)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_engines_hold_what_is_planned(name: str, tmp_path: Path) -> None:
    report = built(name, tmp_path, "rtx-blackwell")
    decoder = decoder_of(read(tmp_path / "o.rewritten.onnx"))
    assert decoder is not None
    recurrent = [state for state in decoder.states if state.name.endswith("recurrent")]
    assert len(recurrent) == RECURRENCES[name]
    assert decoder.states
    # States of convolutions are copied behind a step.
    indexers = [state for state in decoder.states if state.name.endswith("indexer")]
    assert report.caches_in_place == 2 * decoder.layers + len(recurrent) + len(indexers)
    planned = [entry for entry in report.subgraphs if entry["decision"] != "keep"]
    assert all("plugin" in entry["realized"] for entry in planned)
    assert report.plugin_layers == len(planned)
    if indexers:  # whose attention is of standard operators
        return
    kept = {entry["kind"] for entry in report.subgraphs if entry["decision"] == "keep"}
    assert kept <= {"decoder", "linear"}
    routers = [entry["name"] for entry in report.subgraphs if (entry["kind"], entry["decision"]) == ("linear", "keep")]
    assert all(router.endswith(("gate", "router")) for router in routers)
    assert sum(entry["kind"] == "recurrent" for entry in planned) == len(recurrent)


@pytest.mark.nightly  # minutes, and the engines above hold the same layers
@pytest.mark.parametrize("name", FIRST)
def test_bundles_hold_the_same(name: str, tmp_path: Path) -> None:
    report = built(name, tmp_path, "thor")
    assert (tmp_path / "o" / "build_engine.py").is_file()
    assert sum(entry["decision"] == "recurrent" for entry in report.subgraphs) == RECURRENCES[name]
    model = onnx.load(next((tmp_path / "o").glob("*.onnx")), load_external_data=False)
    assert sum(node.op_type == "LinearAttention" for node in model.graph.node) == RECURRENCES[name]


@pytest.mark.slow
def test_standard_operators_by_hand(tmp_path: Path) -> None:
    """A model of ONNX's recurrent operators, and of no other that there is a plugin for, becomes a verified engine."""
    from build_attention_in_tensorrt_rtx import recurrent_model

    (tmp_path / "m.onnx").write_bytes(recurrent_model())
    shapes = [
        {"x": (batch, 128, new), **dict.fromkeys("gb", (batch, new, 2))} for batch, new in ((1, 1), (1, 8), (2, 64))
    ]
    bounds = dict(zip(("min_shapes", "opt_shapes", "max_shapes"), shapes, strict=True))
    request = pipeline.Request(
        model=tmp_path / "m.onnx", target=find_target("rtx-blackwell"), output=tmp_path / "o.engine", **bounds
    )
    report = pipeline.run(request)
    assert [entry["realized"] for entry in report.subgraphs] == ["recurrence plugin"]
    assert report.plugin_layers == 2
    assert report.kernels == ["causal_conv", "linear_attention"]
