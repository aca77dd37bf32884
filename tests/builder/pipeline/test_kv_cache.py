"""--attention and --kv-cache on a tiny decoder: what the rewritten model holds, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_models.tiny_decoder import HEAD_DIM, KV_HEADS, VOCAB, TinyDecoder
from trt_nvfp4.builder.accuracy.budget import Budget
from trt_nvfp4.builder.accuracy.runners import with_byte_caches
from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target

SAMPLES, LENGTH = 6, 10


@pytest.fixture
def tiny(seed: int) -> TinyDecoder:
    return TinyDecoder(np.random.default_rng(seed))


@pytest.fixture
def model(tiny: TinyDecoder, tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "tiny.onnx")


@pytest.fixture
def texts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).integers(0, VOCAB, (SAMPLES, LENGTH))


@pytest.fixture
def samples(tiny: TinyDecoder, texts: np.ndarray, tmp_path: Path) -> Path:
    """A text each, into empty caches."""
    folder = tmp_path / "samples"
    folder.mkdir()
    cache = np.zeros((1, KV_HEADS, tiny.decoder.capacity, HEAD_DIM), np.float32)
    for index, text in enumerate(texts):
        lengths = {"past_length": np.array([0]), "new_length": np.array([LENGTH])}
        caches = dict.fromkeys(tiny.decoder.caches, cache)
        np.savez(folder / f"{index}.npz", input_ids=text[None], **lengths, **caches)
    return folder


def rewritten(model: Path, **options: Any) -> tuple[Path, Report]:
    """With attention alone replaced."""
    options = {"exclude": "MatMul|linear|mlp", "attention": "plugin", "stop_after": "rewrite", **options}
    report = run(model, **options)
    return Path(report.files["rewritten model"]), report


def planned(model: Path, **options: Any) -> Report:
    return run(model, stop_after="plan", **options)


def run(model: Path, **options: Any) -> Report:
    options = {"precision": "bf16", "activations": "keep", "accuracy_samples": 0, **options}
    target, output = find_target("rtx-blackwell"), model.parent / "o.engine"
    return pipeline.run(pipeline.Request(model=model, target=target, output=output, **options))


def attention_entry(report: Report) -> dict[str, Any]:
    (entry,) = [entry for entry in report.subgraphs if entry["kind"] == "attention"]
    return entry


def test_fp8_caches_have_a_calibrated_scale_per_head(
    tiny: TinyDecoder, model: Path, samples: Path, texts: np.ndarray
) -> None:
    file, report = rewritten(model, kv_cache="fp8", calib_data=samples, accuracy_samples=0)
    assert attention_entry(report)["decision"] == "attention_fp8"
    proto = onnx.load(file)
    (node,) = [node for node in proto.graph.node if node.op_type == "CachedAttention"]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    x = tiny.weights["embedding"][texts] + tiny.weights["positions"][:LENGTH]
    for name, weight in zip(node.input[9:], ("wk", "wv"), strict=True):
        by_head = (x @ tiny.weights[weight]).reshape(-1, KV_HEADS, HEAD_DIM)
        np.testing.assert_allclose(constants[name], abs(by_head).max((0, 2)) / 448, rtol=1e-4)
    decoder = decoder_of(proto)
    assert decoder is not None
    assert list(decoder.fp8_caches) == list(decoder.caches)


def test_fp8_caches_generate_and_are_compared_step_by_step(model: Path, samples: Path, texts: np.ndarray) -> None:
    file, report = rewritten(model, kv_cache="fp8", calib_data=samples, accuracy_samples=2)
    steps = report.accuracy["steps"]
    assert (len(steps["steps"]), steps["prompts"]) == (24 - LENGTH // 2 + 1, 2)  # all that the caches hold
    assert 0 < steps["kl"] < 0.1
    with Generator(file) as generator:
        result = generator.generate([text[:4].tolist() for text in texts[:2]], max_new_tokens=6, stop=[])
    assert [len(generation.token_ids) for generation in result.generations] == [6, 6]


def test_a_budget_chooses_the_caches(model: Path, samples: Path) -> None:
    loose, tight = (
        rewritten(model, calib_data=samples, accuracy_budget=Budget.parse(f"cosine>={limit}"))[1]
        for limit in ("0.9", "0.99999999")
    )
    assert attention_entry(loose)["decision"] == "attention_fp8"
    assert attention_entry(tight)["decision"] == "attention"
    # Each text over empty caches, and its rest over the caches that the same precisions filled.
    assert loose.budget["held_out_samples"] + loose.budget["choosing_samples"] == 2 * SAMPLES


def test_the_plugin_generates_what_torch_does(model: Path, tiny: TinyDecoder, texts: np.ndarray) -> None:
    prompts = [texts[0, :7].tolist(), texts[1, :2].tolist()]
    file, report = rewritten(model)
    assert attention_entry(report)["decision"] == "attention"
    with Generator(file) as generator:
        found = [g.token_ids for g in generator.generate(prompts, max_new_tokens=8, stop=[]).generations]
    assert found == [tiny.greedy(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "fp8"}, "--kv-cache fp8 scales keys and values by calibration data"),
        ({"kv_cache": "bf16"}, "have the network's type, float32"),
        ({"kv_cache": "fp8", "attention": "tensorrt"}, "TensorRT's own cache update takes no FP8"),
    ],
)
def test_refused(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rewritten(model, **options)
    assert not (model.parent / "o.plan.yaml").exists()


def test_native_leaves_it_to_tensorrt(model: Path) -> None:
    assert attention_entry(planned(model, attention="tensorrt"))["decision"] == "keep"


def test_float32_stays_native_by_default(model: Path) -> None:
    report = planned(model, attention="auto")
    entry = attention_entry(report)
    assert (entry["decision"], "its activations are float32" in entry["reason"]) == ("keep", True)


def test_filled_caches_cannot_become_bytes() -> None:
    sample = {"past_key_values.0.key": np.zeros((1, 2, 3, 4), np.float32), "input_ids": np.ones((1, 2), np.int64)}
    given = with_byte_caches(sample, {"past_key_values.0.key"})
    assert given["past_key_values.0.key"].dtype == np.int8
    assert given["input_ids"] is sample["input_ids"]
    sample["past_key_values.0.key"][0, 0, 0, 0] = 1
    with pytest.raises(BuilderError, match="give samples with empty caches"):
        with_byte_caches(sample, {"past_key_values.0.key"})
