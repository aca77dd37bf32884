"""What the small configuration of a class needs beside sizes by name. CLASS:CASE is a further one of the class."""

from typing import Any

_DECODES = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": True}


def _pair(encoder: str, decoder: str, **options: Any) -> dict[str, Any]:
    """Of an encoder and a decoder of other models."""
    return {
        "made_with": {"encoder": {"model_type": encoder}, "decoder": {"model_type": decoder}},
        "decoder": _DECODES,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **options,
    }


def _rope(**options: Any) -> dict[str, Any]:
    """Rotary embeddings in three directions."""
    return {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **options}}}


_GLM = _rope(mrope_section=[1, 1, 2], partial_rotary_factor=0.5)
_QWEN3 = {**_rope(mrope_section=[4, 2, 2], mrope_interleaved=True), "vision_config": {"deepstack_visual_indexes": [0]}}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
OPTIONS: dict[str, dict[str, Any]] = {
    "VisionEncoderDecoderModel": _pair("vit", "mbart"),
    "VisionEncoderDecoderModel:trocr": _pair("vit", "trocr"),
    "VisionEncoderDecoderModel:gpt2": _pair("vit", "gpt2"),
    "VisionEncoderDecoderModel:donut": _pair("donut-swin", "mbart"),
    "EncoderDecoderModel": _pair("bert", "bert"),
    "EncoderDecoderModel:roberta": _pair("roberta", "roberta"),
    "SpeechEncoderDecoderModel": _pair("wav2vec2", "mbart"),
    # Pixtral's tower behind LLaVA's code, and PaliGemma of both generations.
    "LlavaForConditionalGeneration:pixtral": {
        "made_with": {"vision_config": {"model_type": "pixtral"}, "text_config": {"model_type": "mistral"}},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "LlavaForConditionalGeneration:siglip": {
        "made_with": {"vision_config": {"model_type": "siglip_vision_model"}, "text_config": {"model_type": "qwen2"}},
        "vision_feature_select_strategy": "full",
    },
    "LlavaForConditionalGeneration:gemma2": {"made_with": {"text_config": {"model_type": "gemma2"}}},
    "PaliGemmaForConditionalGeneration:2": {"made_with": {"text_config": {"model_type": "gemma2"}}},
    "Blip2ForConditionalGeneration:t5": {"made_with": {"text_config": {"model_type": "t5"}}},
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Glm46VForConditionalGeneration": _GLM,
    "GlmOcrForConditionalGeneration": _GLM,
    "Qwen2VLForConditionalGeneration": _rope(mrope_section=[2, 3, 3]),
    "Qwen2_5_VLForConditionalGeneration": _rope(mrope_section=[2, 3, 3]),
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "LlavaNextForConditionalGeneration": _PINPOINTS,
    "LlavaOnevisionForConditionalGeneration": _PINPOINTS,
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "T5ForConditionalGeneration:gated": {"feed_forward_proj": "gated-gelu"},
    "Gemma3nForConditionalGeneration": {
        "text_config": {
            "intermediate_size": [128, 128],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "laurel_rank": 8,
        }
    },
    "Gemma4ForConditionalGeneration": {"text_config": {"per_layer_config": None}},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"per_layer_config": None}},
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [[0, 0]]},
    "MoonshineForConditionalGeneration": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1]}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 100}},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 100}},
    "PegasusXForConditionalGeneration:long": {"max_position_embeddings": 256, "block_size": 8},
}
