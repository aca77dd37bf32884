"""--kinds all,decoder: plans, generated tokens, and an engine whose layers are one plugin over one cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_models.layered_decoder import DIM, KV_HEADS, VOCAB, LayeredDecoder
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan

LAYERS = ("layers.0", "layers.1", "layers.2")
FUSED = (*ALL_KINDS, "decoder")


@pytest.fixture
def model(tmp_path: Path, seed: int) -> Path:
    return LayeredDecoder().save(tmp_path / "m.onnx", np.random.default_rng(seed))


def run(model: Path, name: str, **options: Any) -> Report:
    target, output = find_target("rtx-blackwell"), model.parent / f"{name}.engine"
    options = {"accuracy_samples": 0, "stop_after": "rewrite", **options}
    return pipeline.run(pipeline.Request(model=model, target=target, output=output, **options))


def tokens(report: Report, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (6, 2)]
    with Generator(Path(report.files["rewritten model"])) as generator:
        found = generator.generate(prompts, max_new_tokens=16, stop=[])
    return [generation.token_ids for generation in found.generations]


def test_fused_layers_generate_what_their_parts_do(model: Path, seed: int) -> None:
    parts = run(model, "parts", precision="nvfp4", kinds=ALL_KINDS)
    fused = run(model, "fused", precision="nvfp4", kinds=FUSED, require="nvfp4")
    decided = {entry["name"]: (entry["decision"], entry["kernels"]) for entry in fused.subgraphs}
    assert {decided[name][0] for name in LAYERS} == {"decoder"}
    assert decided["layers.0"][1].startswith("decoder: one launch for up to 16 tokens")
    assert {entry["decision"] for entry in parts.subgraphs if entry["kind"] == "decoder"} == {"keep"}
    assert tokens(fused, seed) == tokens(parts, seed)


def test_a_layer_can_be_left_out(model: Path) -> None:
    """By its name, and in an edited plan."""
    left_out = run(model, "a", precision="nvfp4", kinds=FUSED, exclude=r"layers\.1$", stop_after="plan")
    entry = next(entry for entry in left_out.subgraphs if entry["name"] == "layers.1")
    assert (entry["decision"], entry["reason"]) == ("keep", r"matched by --exclude layers\.1$")
    planned = run(model, "b", precision="nvfp4", kinds=FUSED, stop_after="plan")
    plan = Path(planned.files["plan"])
    text = plan.read_text().split("- name: ")
    (at,) = [index for index, part in enumerate(text) if part.startswith("layers.2\n")]
    text[at] = text[at].replace("decision: decoder", "decision: keep")
    plan.write_text("- name: ".join(text))
    assert [entry.decision for entry in Plan.load(plan).subgraphs if entry.name == "layers.2"] == ["keep"]
    rewritten = run(model, "b", plan=plan)
    decisions = {entry["name"]: entry["decision"] for entry in rewritten.subgraphs if entry["kind"] == "decoder"}
    assert decisions == {"layers.0": "decoder", "layers.1": "decoder", "layers.2": "keep"}


def test_unknown_kinds_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="unknown kind 'decoders'; did you mean 'decoder'"):
        run(model, "a", kinds=("decoders",))


def test_accuracy_is_measured_with_the_caches_of_the_original(model: Path, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, VOCAB, (1, 6))
    lengths = {"past_length": np.array([0]), "new_length": np.array([6])}
    names = [f"past_key_values.{layer}.{part}" for layer in range(3) for part in ("key", "value")]
    caches = dict.fromkeys(names, np.zeros((1, KV_HEADS, 24, DIM), np.float32))
    samples = model.parent / "sample.npz"
    np.savez(samples, input_ids=ids, **lengths, **caches)
    report = run(model, "a", precision="nvfp4", kinds=FUSED, calib_data=samples, accuracy_samples=1)
    rows = {row["name"]: row["cosine"] for row in report.accuracy["tensors"]}
    assert {"logits", "present.0.key", "present.2.value"} <= rows.keys()
    assert rows["present.0.key"] > 0.9


@pytest.mark.slow
def test_engine_has_one_plugin_and_one_cache_in_place(model: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    report = run(model, "o", precision="nvfp4", kinds=FUSED, stop_after=None)
    realized = {entry["name"]: entry["realized"] for entry in report.subgraphs}
    assert {realized[name] for name in LAYERS} == {"decoder plugin"}
    assert report.caches_in_place == 1
    assert report.plugin_layers == {"NVFP4Decoder": 1, "NVFP4Linear": 1} or report.plugin_layers == 2


def test_bundle_says_what_the_caches_are(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_nvfp4.builder.pipeline import build_step

    monkeypatch.setattr(build_step, "_plugins", lambda *_: (None, False))
    run(model, "o", precision="nvfp4", kinds=FUSED, stop_after=None, bundle=tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["caches"] == {"past_key_values.0-2": "present.0-2"}
    assert manifest["decoder"]["stacked"] == [[0, 2]]
    for profile in manifest["profiles"]:
        assert profile["past_key_values.0-2"][2] == [3, 2, 2, 2, 24, 16]
        assert not any(name.endswith(".key") for name in profile)
