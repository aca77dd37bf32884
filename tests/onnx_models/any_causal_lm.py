"""Any class of a causal language model in transformers, tiny and with random weights."""

from typing import Any

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
    **dict.fromkeys(
        ("linear_num_heads", "linear_num_value_heads", "index_n_heads", "indexer_n_heads", "index_topk"), 4
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_conv_kernel_dim", "zero_expert_num", "o_groups"), 2),
    **dict.fromkeys(
        ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_head"), 16
    ),
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
    "BailingHybridForCausalLM": {"layer_group_size": 2, "num_local_experts": 4, "n_group": 1, "topk_group": 1},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
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
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2ForCausalLM": {"head_dim": 32},
    # With few heads many scores of an indexer are all 0, as those of padding are, whose embedding is 0: which of equal
    # ones TopK takes is open.
    "DeepseekV32ForCausalLM": {"index_n_heads": 32, "pad_token_id": None},
    "GlmMoeDsaForCausalLM": {"index_n_heads": 32, "pad_token_id": None},
    "Qwen4ExpForCausalLM": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4},
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
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
    "gemma4_dense": (
        "Gemma4ForCausalLM",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_moe": ("Gemma4ForCausalLM", {**_GEMMA4, "enable_moe_block": True}),
    "gemma4_shared": (
        "Gemma4ForCausalLM",
        {**_GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma3_global": ("Gemma3ForCausalLM", {"num_hidden_layers": 7}),
    "bloom_residual": ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}),
}
# Of a model that is no small one.
LARGEST = 100_000_000


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
