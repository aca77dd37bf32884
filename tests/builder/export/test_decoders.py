"""Small language models with random weights: caches in ONNX generate what transformers generates."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiers import tiers

from onnx_models.cached_greedy import NEW_TOKENS, empty_caches, greedy, session
from onnx_models.small_decoders import DECODER, FAMILIES, SINGLE, TOKENS, saved
from trt_nvfp4.builder import errors
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions, decoder_of
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.rewrite import rewrite

transformers = pytest.importorskip("transformers")

QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
# One of each kind of cache, mask and position; the others differ in what their layers compute.
SLOW = ("phi3", "llama4", "gpt2", "opt", "mpt", "smollm3", "gemma3")
# Why CachedAttention does not serve a family.
ATTENTION_STAYS = {
    "bloom": "its scores are computed by was not recognized",  # ALiBi
    "falcon_alibi": "ALiBi|was not recognized",
    "mpt": "was not recognized",
    "xglm": "no mask computed from positions",
    "deepseek_v2": "computed from the cache at every step",
    "deepseek_v3": "computed from the cache at every step",
    "llama4": "neither causal nor of a window",  # but of a chunk
}
# Of how many layers, where it serves the others.
LAYERS_STAY = {"llama4": 1}


@pytest.mark.parametrize("name", tiers(FAMILIES, QUICK, SLOW))
def test_generates_what_transformers_generates(tmp_path: Path, seed: int, name: str) -> None:
    model = saved(name, tmp_path / name, seed)
    path = export(tmp_path / name, tmp_path / "m.onnx", "auto", CacheOptions(64, max_batch=1 if name in SINGLE else 3))
    graph = onnx.load(path).graph
    operators = {node.op_type for node in graph.node}
    assert "TensorScatter" in operators
    assert {node.domain for node in graph.node} == {""}
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in (5, 9, 3)]
    model.set_attn_implementation("eager")
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # Without an end of text: some tokens would never be compared.
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        generated = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        expected.append(generated[0, len(prompt) :].tolist())
    batches = [[prompt] for prompt in prompts] if name in SINGLE else [prompts]

    def generated_by(file: Path) -> list[list[int]]:
        padding = int(torch.randint(0, 100, ()))
        return [tokens for batch in batches for tokens in greedy(file, batch, padding)]

    assert generated_by(path) == expected

    source = load(path)
    plan = make_plan(
        source,
        find_subgraphs(source),
        Capabilities("any"),
        PlanOptions(kinds=("mlp",), precision="bf16", attention="plugin"),
    )
    plan.subgraphs = [entry for entry in plan.subgraphs if entry.kind == "attention"]
    layers = sum(str(value.name).endswith(".key") for value in source.graph.outputs)
    assert len(plan.subgraphs) == layers
    kept = [entry.reason for entry in plan.subgraphs if entry.decision == "keep"]
    assert len(kept) == (LAYERS_STAY.get(name, layers) if name in ATTENTION_STAYS else 0), kept
    assert all(re.search(ATTENTION_STAYS[name], reason) for reason in kept)
    if len(kept) == layers:
        return
    rewritten = rewrite(source, plan, None, tmp_path / "rewritten.onnx").path
    left = [node.op_type for node in onnx.load(rewritten).graph.node]
    assert (left.count("CachedAttention"), left.count("TensorScatter")) == (layers - len(kept), 2 * len(kept))
    assert generated_by(rewritten) == expected


def test_all_logits_are_those_without_a_cache(tmp_path: Path, seed: int) -> None:
    model = saved("qwen3", tmp_path / "m", seed)
    path = export(tmp_path / "m", tmp_path / "m.onnx", "generate", CacheOptions(16, all_logits=True))
    decoder = decoder_of(onnx.load(path))
    assert decoder is not None
    assert (decoder.all_logits, decoder.capacity) == (True, 16)
    ids = torch.randint(0, 100, (2, 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()
    run, caches = session(path).run, empty_caches(decoder, 2)
    # In two pieces: the second continues behind the first.
    parts = []
    for piece, past in ((ids[:, :4], 0), (ids[:, 4:], 4)):
        lengths = {"past_length": np.full(2, past), "new_length": np.full(2, piece.shape[1])}
        logits, *present = run(None, {"input_ids": piece.numpy(), **lengths, **caches})
        caches = dict(zip(decoder.caches, present, strict=True))
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=1e-3, atol=1e-4)


def test_long_rope_changes_with_the_length_of_each_sequence(tmp_path: Path, seed: int) -> None:
    model = saved("phi3", tmp_path / "m", seed)
    path = export(tmp_path / "m", tmp_path / "m.onnx", "generate", CacheOptions(100, max_batch=2))
    decoder = decoder_of(onnx.load(path))
    assert decoder is not None
    assert decoder.recompute_length == 64
    lengths = np.array([80, 20])
    ids = torch.randint(0, 100, (2, 80))
    feed = {"input_ids": ids.numpy(), "past_length": np.zeros_like(lengths), "new_length": lengths}
    logits = session(path).run(["logits"], {**feed, **empty_caches(decoder, 2)})[0]
    for row, length in enumerate(lengths):
        with torch.no_grad():
            expected = model(input_ids=ids[row : row + 1, :length]).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[row, -1], expected, rtol=1e-3, atol=1e-4)


def a_state_of_another_arithmetic(folder: Path) -> None:
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, **TOKENS)).save_pretrained(folder)


def local_attention_of_its_own(folder: Path) -> None:
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, attention_types=kinds, window_size=4, **TOKENS
    )
    transformers.GPTNeoForCausalLM(config).save_pretrained(folder)


def without_head(folder: Path) -> None:
    transformers.LlamaModel(transformers.LlamaConfig(**DECODER)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "options", "message"),
    [
        (
            a_state_of_another_arithmetic,
            CacheOptions(16),
            r"\(model type rwkv\) cannot .*: its layers cache no keys and values.*; add --task features",
        ),
        (
            lambda folder: saved("llama4", folder, 0),
            CacheOptions(16, max_batch=2),
            "--max-batch 2: Llama4ForCausalLM can be exported for one sequence at a time only .*leave the option out",
        ),
        (local_attention_of_its_own, CacheOptions(32), "logits differ by .* without a cache"),
        (without_head, CacheOptions(16), "no language model head"),
        (lambda folder: saved("llama", folder, 0), CacheOptions(129), "--cache-capacity 129: .* allows for 128 tokens"),
    ],
    ids=["other_state", "one_length", "other_mask", "no_head", "capacity"],
)
def test_refused_with_the_reason(
    tmp_path: Path, save: Callable[[Path], None], options: CacheOptions, message: str
) -> None:
    save(tmp_path / "m")
    with pytest.raises(BuilderError, match=message) as failure:
        export(tmp_path / "m", tmp_path / "m.onnx", "generate", options)
    assert failure.value.exit_code in (errors.MODEL_AT_FAULT, errors.USAGE)
    assert not (tmp_path / "m.onnx").exists()
