"""Small language models of many families with random weights, as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
import transformers

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
LAYER_TYPES = ["sliding_attention", "full_attention"]
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
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GEMMA, "layer_types": LAYER_TYPES}),
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
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**DECODER, **EXPERTS, "num_experts": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}),  # masks count tokens
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", {**SMALL, "alibi": True}),
    "mpt": ("MptConfig", "MptForCausalLM", {**TOKENS, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**GPT2, "rotary_dim": 8}),  # divides behind its mask
    "xglm": (
        "XGLMConfig",
        "XGLMForCausalLM",
        {**TOKENS, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4, "pad_token_id": 0},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **DECODER,
            **LOCAL,
            "no_rope_layers": [1, 0],
            "num_local_experts": 4,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 8,
            "floor_scale": 4,
        },
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),  # alibi
}
# With one number of cached tokens for a whole batch.
SINGLE = {"llama4"}


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
