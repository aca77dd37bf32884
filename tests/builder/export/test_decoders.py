"""Small language models with random weights: caches in ONNX generate what transformers generates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export.decoder_contract import CacheOptions, Decoder, decoder_of
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.rewrite import rewrite

transformers = pytest.importorskip("transformers")

NEW_TOKENS = 32
TOKENS: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
DECODER = {**GROUPED, "head_dim": 16}
GPT2 = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"sliding_window": 8}
GEMMA = {**DECODER, **LOCAL, "query_pre_attn_scalar": 16}
LATENT = {
    **GROUPED,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    **EXPERTS,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i / 2 for i in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, "num_hidden_layers": 2}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 7}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**DECODER, **LOCAL, **EXPERTS, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, **LOCAL}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**GROUPED, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
    ),
    "phi4": ("Phi3Config", "Phi3ForCausalLM", {**GROUPED, **LOCAL, "partial_rotary_factor": 0.5}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.1},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**GROUPED, "partial_rotary_factor": 0.25}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "rotary_pct": 0.25}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**GROUPED, "num_hidden_layers": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**DECODER, **EXPERTS, "num_experts": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}),  # masks count tokens
    "bloom": ("BloomConfig", "BloomForCausalLM", {**TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),  # alibi
}
QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
# Why CachedAttention does not serve a family.
ATTENTION_STAYS = {"bloom": "its scores are computed by was not recognized"}  # ALiBi
# Latent attention: what is cached is no keys and values of heads.
WITHOUT_ATTENTION = ("deepseek_v2", "deepseek_v3")


def saved(name: str, folder: Path, seed: int) -> Any:
    config, cls, options = FAMILIES[name]
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # initial weights are so small that attention makes no difference
            else:
                parameter.add_(torch.rand_like(parameter) / 2)  # norms' weights are all the same
    model.save_pretrained(folder)
    return model


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a note for every cache that is not updated in place
    return onnxruntime.InferenceSession(path, options)


def empty_caches(decoder: Decoder, batch: int) -> dict[str, np.ndarray]:
    dims = [dim for pair in zip(decoder.head_dim, decoder.value_head_dim, strict=True) for dim in pair]
    heads = [count for count in decoder.kv_heads for _ in range(2)]
    return {
        name: np.zeros((batch, count, decoder.capacity, dim), np.float32)
        for name, count, dim in zip(decoder.caches, heads, dims, strict=True)
    }


def greedy(path: Path, prompts: list[list[int]], padding: int) -> list[list[int]]:
    decoder = decoder_of(onnx.load(path))
    assert decoder is not None
    run, caches = session(path).run, empty_caches(decoder, len(prompts))
    new = np.array([len(prompt) for prompt in prompts])
    ids = np.full((len(prompts), max(new)), padding)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    past, texts = np.zeros_like(new), []
    for _ in range(NEW_TOKENS):
        logits, *present = run(None, {"input_ids": ids, "past_length": past, "new_length": new, **caches})
        assert logits.shape == (len(prompts), 1, decoder.vocab_size)
        ids, past, new = logits.argmax(-1), past + new, np.ones_like(new)
        caches = dict(zip(decoder.caches, present, strict=True))
        texts.append(ids[:, 0])
    return np.stack(texts, 1).tolist()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_generates_what_transformers_generates(tmp_path: Path, seed: int, name: str) -> None:
    model = saved(name, tmp_path / name, seed)
    path = export(tmp_path / name, tmp_path / "m.onnx", "auto", CacheOptions(capacity=64, max_batch=3))
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
    assert greedy(path, prompts, padding=int(torch.randint(0, 100, ()))) == expected

    source = load(path)
    plan = make_plan(
        source, find_subgraphs(source), Capabilities("any"), kinds=("mlp",), precision="bf16", attention="plugin"
    )
    plan.subgraphs = [entry for entry in plan.subgraphs if entry.kind == "attention"]
    layers = sum(str(value.name).endswith(".key") for value in source.graph.outputs)
    assert len(plan.subgraphs) == (0 if name in WITHOUT_ATTENTION else layers)
    if (reason := ATTENTION_STAYS.get(name)) is not None or name in WITHOUT_ATTENTION:
        assert all(entry.decision == "keep" and re.search(str(reason), entry.reason) for entry in plan.subgraphs)
        return
    rewritten = rewrite(source, plan, None, tmp_path / "rewritten.onnx").path
    left = [node.op_type for node in onnx.load(rewritten).graph.node]
    assert (left.count("CachedAttention"), left.count("TensorScatter")) == (layers, 0)
    assert greedy(rewritten, prompts, padding=int(torch.randint(0, 100, ()))) == expected


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
        np.testing.assert_allclose(logits[row, 0], expected, rtol=1e-3, atol=1e-4)


def mamba(folder: Path) -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, **TOKENS)
    transformers.MambaForCausalLM(config).save_pretrained(folder)


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
        (mamba, CacheOptions(16), "MambaForCausalLM cannot be exported with a key-value cache: .*--task features"),
        (local_attention_of_its_own, CacheOptions(32), "logits differ by .* without a cache"),
        (without_head, CacheOptions(16), "no language model head"),
        (lambda folder: saved("llama", folder, 0), CacheOptions(129), "--cache-capacity 129: .* allows for 128 tokens"),
    ],
    ids=["no_cache", "other_mask", "no_head", "capacity"],
)
def test_refused_with_the_reason(
    tmp_path: Path, save: Callable[[Path], None], options: CacheOptions, message: str
) -> None:
    save(tmp_path / "m")
    with pytest.raises(BuilderError, match=message) as failure:
        export(tmp_path / "m", tmp_path / "m.onnx", "generate", options)
    assert failure.value.exit_code in (errors.MODEL_AT_FAULT, errors.USAGE)
    assert not (tmp_path / "m.onnx").exists()
