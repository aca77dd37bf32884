"""Whole steps of a decoder: prompts of two lengths and decode steps, with all plugin nodes on the emulated GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_engine import EmulatedEngine, Fault
from split_host import SplitHost
from torch import Tensor

import trt_nvfp4
from trt_nvfp4.builder.generate.loop import advance, prefill
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.runner import Runner

pytestmark = pytest.mark.slow

VOCAB = 96
#: Of bfloat16 activations over two layers.
LARGEST_ERROR = 0.03


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
#: Configuration, and options of the build.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, {}),
    "one launch": ("LlamaConfig", {}, {"kinds": "all,decoder"}),
    "mixture": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        {},
    ),
    "hybrid": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, {}),
}


@pytest.fixture
def rewritten(model: str, tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(5)
    name, sizes, options = MODELS[model]
    config = getattr(transformers, name)(**SIZES, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return trt_nvfp4.rewrite(
        tmp_path / "model",
        target="rtx-blackwell",
        output=tmp_path / "model.engine",
        cache_capacity=32,
        max_batch=2,
        **options,
    ).files["rewritten model"]


def steps(
    runner: Runner, text: Sequence[Sequence[int]], count: int, decoding: Callable[[], object] = lambda: None
) -> list[np.ndarray]:
    """Logits behind the prompts and of `count` further tokens, which `text` gives: [sequences, vocabulary] each.
    `decoding` is called between the two."""
    rows = [list(row[:-count]) for row in text]
    runner.start(len(rows))
    found = [prefill(runner, rows).host()]
    decoding()
    for _ in range(count):
        for row, whole in zip(rows, text, strict=True):
            row.append(whole[len(row)])
        found.append(advance(runner, rows, range(len(rows))).host())
    return found


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) if np.isfinite(a).all() else np.inf
        for a, b in zip(found, expected, strict=True)
    )


def one_token_too_many(op: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The attention is given a past length that is one too long."""
    if op != "CachedAttention":
        return inputs
    lengths = [index for index, x in enumerate(inputs) if x.dtype == torch.int64 and x.dim() == 1]
    return [x + 1 if index == lengths[0] else x for index, x in enumerate(inputs)]


def other_stride(op: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The attention is given caches as if they held fewer tokens, so that heads lie closer together than the prompt's
    step wrote them."""
    if op != "CachedAttention":
        return inputs
    return [x.view(-1)[: x.numel() * 3 // 4].view(*x.shape[:2], 24, -1) if x.dim() == 4 else x for x in inputs]


def left_out(op: str, inputs: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The attention is not launched: its output is what was there before."""
    return None if op == "CachedAttention" else inputs


@pytest.mark.parametrize(
    ("model", "emulated_gpu"),
    [
        ("llama", "rtx-blackwell"),
        *(
            pytest.param(model, gpu, marks=pytest.mark.nightly)
            for model in MODELS
            for gpu in ("rtx-blackwell", "b200")
            if (model, gpu) != ("llama", "rtx-blackwell")
        ),
    ],
    indirect=["emulated_gpu"],
)
def test_steps_equal_onnx_runtime(
    model: str, rewritten: Path, emulated: SplitHost, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    faults: list[Fault] = []
    engine = EmulatedEngine(rewritten, emulated, monkeypatch, 2, 32, 4, faults)
    reference = OnnxRunner(rewritten)
    for lengths in ((21,), (8, 15)):
        text = [rng.integers(1, VOCAB, length).tolist() for length in lengths]
        expected = steps(reference, text, 3)
        assert error(steps(engine, text, 3), expected) < LARGEST_ERROR
    assert all(profile.enqueued > 3 for profile in engine.profiles.values())
    # What the comparison must notice.
    for fault in (one_token_too_many, other_stride, left_out) if model == "llama" else ():
        faults.clear()
        found = steps(engine, text, 3, lambda fault=fault: faults.append(fault))
        assert error(found[-1:], expected[-1:]) > 2 * LARGEST_ERROR, fault
