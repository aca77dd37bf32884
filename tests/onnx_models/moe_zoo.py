"""Small mixtures of experts of transformers with random weights: every way of routing that published models use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onnx_models import zoo
from onnx_models.zoo import Entry
from trt_nvfp4.builder.export.onnx_arithmetic import onnx_arithmetic

_TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    **_TEXT,
    "hidden_size": 64,
    "num_hidden_layers": zoo.LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


def _entry(name: str, activation: str = "silu", **arguments: Any) -> Entry:
    return Entry(f"{name}Model", f"{name}Config", {**_DECODER, **arguments}, "moe", activation)


# Sizes: hidden 64 (but where SIZES says otherwise), intermediate 48.
MOE_ZOO: dict[str, Entry] = {
    "qwen3_moe": _entry(
        "Qwen3Moe", head_dim=16, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "mixtral": _entry("Mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": _entry(
        "DeepseekV3",
        **_LATENT,
        num_key_value_heads=4,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        first_k_dense_replace=0,
    ),
    "olmoe": _entry("Olmoe", intermediate_size=48, num_experts=8, num_experts_per_tok=3),
    "flex_olmo": _entry("FlexOlmo", intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    "gpt_oss": _entry(
        "GptOss", "swiglu_clamped", head_dim=16, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama4": Entry(
        "Llama4TextModel",
        "Llama4TextConfig",
        {
            **_DECODER,
            "head_dim": 16,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
        "moe",
        "silu",
    ),
    "qwen2_moe": _entry(
        "Qwen2Moe", moe_intermediate_size=48, shared_expert_intermediate_size=80, num_experts=8, num_experts_per_tok=3
    ),
    "deepseek_v2": _entry(
        "DeepseekV2",
        **_LATENT,
        num_key_value_heads=4,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
    ),
    "deepseek_v4": _entry(
        "DeepseekV4",
        "silu_clamped",
        num_key_value_heads=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        hc_mult=2,
        hc_sinkhorn_iters=1,
        layer_types=["sliding_attention"] * zoo.LAYERS,
        mlp_layer_types=["moe"] * zoo.LAYERS,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=0.5,
    ),
    "ernie4_5_moe": _entry(
        "Ernie4_5_Moe", moe_intermediate_size=48, moe_num_experts=8, moe_k=3, moe_layer_start_index=0
    ),
    "gemma4": _entry(
        "Gemma4Text",
        "gelu_tanh",
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        intermediate_size=80,
        enable_moe_block=True,
        moe_intermediate_size=48,
        num_experts=8,
        top_k_experts=3,
    ),
    "granitemoeshared": _entry(
        "GraniteMoeShared",
        intermediate_size=48,
        shared_intermediate_size=80,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "hunyuan_v1_moe": _entry("HunYuanMoEV1", intermediate_size=48, head_dim=16, num_experts=8, moe_topk=3),
    "hy_v4": _entry(
        "HYV4",
        "silu_clamped",
        **_LATENT,
        num_key_value_heads=4,
        mlp_layer_types=["sparse"] * zoo.LAYERS,
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        swiglu_limit=0.5,
        index_head_dim=16,
        index_n_heads=2,
    ),
    "kolibri1": _entry(
        "Kolibri1",
        head_dim=16,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "lfm2_moe": _entry(
        "Lfm2Moe",
        layer_types=["full_attention"] * zoo.LAYERS,
        num_dense_layers=0,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "minimax_m3": _entry(
        "MiniMaxM3VLText",
        "swiglu_clamped",
        head_dim=16,
        intermediate_size=48,
        shared_intermediate_size=80,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "nemotron_h": _entry(
        "NemotronH",
        "relu2",
        head_dim=16,
        layers_block_type=["attention", "moe"] * zoo.LAYERS,
        moe_intermediate_size=48,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=80,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
    ),
    "phimoe": _entry("Phimoe", intermediate_size=48, num_local_experts=8, num_experts_per_tok=2),
}
# What differs from 8 gated experts of 64-48-64.
SIZES: dict[str, dict[str, int]] = {
    **{name: {"experts": 4} for name in ("mixtral", "gpt_oss", "llama4")},
    "nemotron_h": {"in_features": 32, "out_features": 32, "gated": 0},
}
# What each routes like: the attributes of NVFP4MoE that are not the default.
ROUTING: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"top_k": 3, "scoring": "softmax", "renormalize": True},
    "mixtral": {"top_k": 2, "scoring": "softmax", "renormalize": True},
    "deepseek_v3": {
        "top_k": 3,
        "scoring": "sigmoid",
        "renormalize": True,
        "scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "group_score_top": 2,
    },
    "olmoe": {"top_k": 3, "scoring": "softmax"},
    "flex_olmo": {"top_k": 2, "scoring": "softmax"},
    "gpt_oss": {"top_k": 2, "scoring": "softmax_of_chosen"},
    "llama4": {"top_k": 1, "scoring": "sigmoid_of_chosen", "scale_input": True},
    "qwen2_moe": {"top_k": 3, "scoring": "softmax"},
    "deepseek_v2": {"top_k": 3, "scoring": "softmax", "scaling_factor": 16.0, "n_group": 4, "topk_group": 2},
    "deepseek_v4": {"top_k": 3, "scoring": "sqrt_softplus", "renormalize": True, "scaling_factor": 1.5},
    "ernie4_5_moe": {"top_k": 3, "scoring": "softmax", "renormalize": True},
    "gemma4": {"top_k": 3, "scoring": "softmax", "renormalize": True},
    "granitemoeshared": {"top_k": 3, "scoring": "softmax_of_chosen"},
    "hy_v4": {"top_k": 3, "scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5},
    "hunyuan_v1_moe": {"top_k": 3, "scoring": "softmax", "renormalize": True},
    "kolibri1": {"top_k": 3, "scoring": "sigmoid_of_chosen"},
    "lfm2_moe": {"top_k": 3, "scoring": "sigmoid", "renormalize": True},
    "minimax_m3": {"top_k": 3, "scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.0},
    "nemotron_h": {"top_k": 3, "scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5},
    "phimoe": {"top_k": 2, "scoring": "given"},
}
# With a correction bias; with attention that chooses its keys by a TopK of its own.
BIASED = {"deepseek_v3", "deepseek_v4", "ernie4_5_moe", "hy_v4", "kolibri1", "lfm2_moe", "minimax_m3", "nemotron_h"}
INDEXED = {"hy_v4"}
# Width of the shared expert, and whether it has a gate of its own.
SHARED = {
    "deepseek_v3": (96, False),
    "llama4": (48, False),
    "qwen2_moe": (80, True),
    "deepseek_v2": (96, False),
    "deepseek_v4": (48, False),
    "ernie4_5_moe": (96, False),
    "granitemoeshared": (80, False),
    "hunyuan_v1_moe": (48, False),
    "kolibri1": (80, False),
    "minimax_m3": (80, False),
}


def fastest_exporter(name: str) -> str:
    """TorchScript takes a tenth of dynamo's time; of Llama 4's masks it makes a sum of booleans, which nothing runs,
    and a Squeeze of a parameter, as in ERNIE, a scatter of booleans, as in HY-V4, and DeepSeek-V4 it cannot export."""
    return "dynamo" if name in ("llama4", "deepseek_v4", "ernie4_5_moe", "hy_v4") else "torchscript"


def instance(name: str, seed: int = 0) -> torch.nn.Module:
    """The bare model, its matrices scaled so that experts and routers matter."""
    model = zoo.instance(MOE_ZOO[name], seed)
    model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
    return model


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
    """The model, and a function that draws an input for a seed."""
    return zoo.wrapped(MOE_ZOO[name], instance(name, seed), dtype)


def export(model: torch.nn.Module, example: torch.Tensor, path: Path, exporter: str) -> None:
    """As `zoo.export`; Llama 4 computes with complex numbers."""
    with onnx_arithmetic():
        zoo.export(model, example, path, exporter)
