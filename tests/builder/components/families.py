"""Small models of several parts with random weights, by their transformers classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

IMAGE = 119
_TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False}
_PATCHES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 118,
    "vision_start_token_id": 117,
    "vision_end_token_id": 116,
}
_LLAMA = {"model_type": "llama", **_TEXT}
_BART = {
    "vocab_size": 100,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def _rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **options}}


#: Name -> class, without the end of its configuration's, and options of that.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "vision_config": {**_SIGLIP, "projection_dim": 64},
            "text_config": {"model_type": "gemma", **_TEXT},
            "projection_dim": 64,
            "image_token_index": IMAGE,
        },
    ),
    # The window is shorter than an image: its tokens see each other all the same.
    "paligemma2": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "vision_config": {**_SIGLIP, "projection_dim": 64},
            "text_config": {"model_type": "gemma2", **_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
            "projection_dim": 64,
            "image_token_index": IMAGE,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "vision_config": _SIGLIP,
            "text_config": {
                "model_type": "gemma3_text",
                **_TEXT,
                "num_hidden_layers": 3,
                "sliding_window": 3,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"vision_config": _VISION, "text_config": _LLAMA, "scale_factor": 2, "image_token_id": IMAGE},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **_TEXT},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 64},
            "text_config": _LLAMA,
            "image_token_index": IMAGE,
        },
    ),
    # A tower for images of any size (Pixtral's), built for one.
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16, "image_size": 64},
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
    ),
    # A table of positions that is sampled for the image's size.
    "glm4v": (
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        {
            "vision_config": {**_PATCHES, "image_size": 32},
            "text_config": {**_TEXT, **_rope(mrope_section=[1, 1, 2], partial_rotary_factor=0.5)},
            **{name: token for name, token in _TOKENS.items() if not name.startswith("vision")},
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionConfig",
        {
            "vision_config": _SIGLIP,
            "text_config": {"model_type": "qwen2", **_TEXT},
            "image_token_index": IMAGE,
            "video_token_index": 118,
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "vision_config": {**_PATCHES, "window_size": 32, "fullatt_block_indexes": [1]},
            "text_config": {**_TEXT, **_rope(mrope_section=[2, 3, 3])},
            **_TOKENS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {**_TEXT, **_rope(mrope_section=[4, 2, 2], mrope_interleaved=True)},
            **_TOKENS,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 100,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "eos_token_id": 2,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
    ),
    "marian": ("MarianMTModel", "MarianConfig", {**_BART, "max_position_embeddings": 64}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**_BART, "max_position_embeddings": 64}),
    "trocr": (
        "VisionEncoderDecoderModel",
        "VisionEncoderDecoderConfig",
        {
            "encoder": {"model_type": "vit", **_VISION},
            "decoder": {
                "model_type": "mbart",
                **_BART,
                "max_position_embeddings": 64,
                "is_decoder": True,
                "is_encoder_decoder": False,
                "add_cross_attention": True,
            },
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BART,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
    ),
}


def amplified(model: Any, folder: Path) -> Any:
    """A model whose random weights are made three times as large (as drawn, attention makes no difference), saved in
    `folder`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return model


def saved(name: str, folder: Path, seed: int) -> Any:
    """The model, whose directory is `folder`."""
    cls, config, options = FAMILIES[name]
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval()
    return amplified(model, folder)
