"""Every class of a causal language model in transformers, tiny and with random weights: tokens over caches in ONNX.

    python tests/builder/export/family_sweep.py [--jobs 8] [--seconds 300] [--out results.jsonl] [NAME ...]

Each class runs in a process of its own. It must generate transformers' greedy tokens (FP32, three prompts of different
lengths, ONNX Runtime), or be refused with one message; anything else is a failure. NAME: a class of transformers or a
variant of `VARIANTS`; default: all. Not a test: all of them take hours of CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

# Whatever a configuration calls its sizes. Lists per layer are left to the configuration.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "embed_dim"), 64),
    **dict.fromkeys(("emb_dim", "lru_width", "ssm_hidden_size", "cross_attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "d_inner", "decoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "dense_intermediate_size", "d_ff"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "swa_num_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "global_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("attention_head_dim", "attention_hidden_size_per_head", "index_head_dim", "indexer_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "original_vocab_size", "unpadded_vocab_size"), 100),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "moe_layer_start_index", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size"), 8),
    **dict.fromkeys(("attention_window_size", "local_attention"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("linear_num_value_heads", "index_n_heads", "indexer_n_heads", "index_topk"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_conv_kernel_dim", "zero_expert_num", "o_groups"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
# What sizes alone do not make a small model of, by class.
OF_CLASS: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "Gemma3nForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4AssistantForCausalLM": {"hidden_size_per_layer_input": 0},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2ForCausalLM": {"head_dim": 32},
    "Qwen4ExpForCausalLM": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4},
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "Zamba2ForCausalLM": {"layer_types": ["mamba", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
# Configurations that compute what their family's default does not: class and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm_parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, "qk_layernorm": True}),
    "stablelm_bias": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "falcon_new": ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": ("FalconForCausalLM", {"multi_query": True, "parallel_attn": True, "bias": True}),
    "falcon_heads": ("FalconForCausalLM", {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4}),
    "falcon_alibi": ("FalconForCausalLM", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "gpt_neox_sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "gpt_bigcode_heads": ("GPTBigCodeForCausalLM", {"multi_query": False}),
    "gpt2_reordered": ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "mpt_multi_query": ("MptForCausalLM", {"no_bias": False}),
    "mixtral_window": ("MixtralForCausalLM", {"sliding_window": 8}),
    "phi_qk": ("PhiForCausalLM", {"qk_layernorm": True}),
    "qwen2_window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "cohere_qk": ("CohereForCausalLM", {"use_qk_norm": True}),
    "llama_dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "opt_before": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "gemma3_global": ("Gemma3ForCausalLM", {"num_hidden_layers": 7}),
    "bloom_residual": ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}),
}
CAPACITY, PROMPTS = 64, (5, 9, 3)
# Of a model that is no small one.
LARGEST = 100_000_000
GOOD = ("equal", "near tie", "refused")


def classes() -> list[str]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = [name for name in dir(transformers) if name.endswith(("ForCausalLM", "LMHeadModel"))]
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if "Conditional" not in name}
    return sorted({*known, *named} - {"AutoModelForCausalLM"})


def _small(known: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for a configuration of these entries, and for those of its parts."""
    sizes = {key: value for key, value in SIZES.items() if key in known and not isinstance(known[key], (list, dict))}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        # Latent attention: each head has keys of its own, of which a part of a size of its own turns.
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": sizes["qk_rope_head_dim"]}
        sizes.pop("partial_rotary_factor", None)
    parts = {key: value for key, value in known.items() if isinstance(value, dict) and key.endswith("_config")}
    parts.pop("per_layer_config", None)
    return sizes | {key: {**value, **_small(value)} for key, value in parts.items()}


def made(name: str) -> Any:
    """A small model of the class or variant with random weights. Raises whatever transformers raises."""
    import torch
    import transformers

    architecture, options = VARIANTS.get(name, (name, {}))
    cls = getattr(transformers, architecture)
    known = cls.config_class().to_dict()
    config = cls.config_class(**{**_small(known), **OF_CLASS.get(architecture, {}), **options})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.rand_like(parameter) / 2)  # norms' weights are all the same
            elif parameter.any():
                parameter.mul_(3)  # initial weights are so small that attention makes no difference
            else:
                parameter.normal_(std=0.1)
    return model


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """How the class ends, and what was said."""
    import numpy as np
    import onnx
    import torch
    from transformers import GenerationConfig

    from onnx_models.cached_greedy import NEW_TOKENS, greedy
    from trt_nvfp4.builder.errors import BuilderError
    from trt_nvfp4.builder.export.decoder_contract import CacheOptions, decoder_of
    from trt_nvfp4.builder.export.huggingface import export

    try:
        model = made(name)
        model.save_pretrained(folder / name)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {str(error)[:400]}"
    try:
        path = export(folder / name, folder / "m.onnx", "generate", CacheOptions(CAPACITY, max_batch=None))
    except BuilderError as error:
        return "refused", str(error).replace(str(folder), "")
    decoder = decoder_of(onnx.load(path, load_external_data=False))
    assert decoder is not None
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in PROMPTS]
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("eager")
    # Without an end of text, and tokens that are forced or forbidden: some would never be compared.
    model.generation_config, model.config.eos_token_id = GenerationConfig(), None
    batches = [[prompt] for prompt in prompts] if decoder.max_batch == 1 else [prompts]
    found = [tokens for batch in batches for tokens in greedy(path, batch, padding=7)]
    said = []
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        text = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        if text == tokens:
            continue
        first = int(np.argmax(np.array(text) != np.array(tokens)))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + text[:first]]), use_cache=False).logits[0, -1].double()
        gap = float(logits[text[first]] - logits[tokens[first]]) / float(logits.std())
        said.append((gap, f"token {first} of the prompt of {len(prompt)}: {gap:.1e} standard deviations apart"))
    if not said:
        single = ", one sequence at a time" if decoder.max_batch == 1 else ""
        return "equal", f"{len(set(np.ravel(found)))} different tokens{single}"
    worst = max(said)
    return ("near tie" if abs(worst[0]) < 1e-3 else "different"), worst[1]


def one(name: str) -> dict[str, Any]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            how, said = outcome(name, Path(folder))
        except Exception:
            how, said = "raised", traceback.format_exc()[-3000:]
    return {"name": name, "how": how, "said": said, "seconds": round(time.monotonic() - begun, 1)}


def run(name: str, seconds: float) -> dict[str, Any]:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"name": name, "how": "too long", "said": f"over {seconds:.0f} s", "seconds": seconds}
    if ran.returncode:
        return {"name": name, "how": "died", "said": f"{ran.returncode}: {ran.stderr[-2000:]}", "seconds": 0.0}
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="for each class")
    parser.add_argument("--out", type=Path, help="one JSON object a line, written as they end")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        names = options.names or [*VARIANTS, *classes()]
        for future in as_completed([pool.submit(run, name, options.seconds) for name in names]):
            result = future.result()
            counts[result["how"]] += 1
            print(
                f"{result['name']:36} {result['seconds']:6.1f} s  {result['how']}: {result['said'][-300:]}", flush=True
            )
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print(dict(counts))
    return 0 if counts.keys() <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())
