"""Small models of several parts with random weights, by their transformers classes."""

from pathlib import Path
from typing import Any

import torch
import transformers

from .small_configs import config_of
from .small_options import OPTIONS

IMAGE = 119
_LOCAL = {"num_hidden_layers": 3, "sliding_window": 3}
_LOCAL |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA4: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_TWO_HEAD_SIZES = {"audio_config": None, "made_with": {"text_config": {**_GEMMA4, "global_head_dim": 32}}}
_GEMMA4 |= {"sliding_window": 6}
_POOLED = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "position_embedding_size": 64}
_POOLED |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
}
#: Name -> class, with its case among OPTIONS, and further changes of its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "paligemma": ("PaliGemmaForConditionalGeneration", {}),
    # The window is shorter than an image: its tokens see each other all the same.
    "paligemma2": ("PaliGemmaForConditionalGeneration:2", {"text_config": {"sliding_window": 8}}),
    "gemma3": ("Gemma3ForConditionalGeneration", {"text_config": _LOCAL}),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            **_TWO_HEAD_SIZES,
            "vision_config": {**_POOLED, "standardize": True},
            "text_config": {**_GEMMA4, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
        },
    ),
    # With an embedding for each layer, and layers that share keys and values.
    "gemma4_per_layer": (
        "Gemma4ForConditionalGeneration",
        {
            **_TWO_HEAD_SIZES,
            "vision_config": _POOLED,
            "text_config": {**_GEMMA4, "num_kv_shared_layers": 2},
        },
    ),
    "voxtral": ("VoxtralForConditionalGeneration", {}),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", {}),
    "qwen3_asr": (
        "Qwen3ASRForConditionalGeneration",
        {"audio_config": {"n_window_infer": 100, "downsample_hidden_size": 16}},
    ),
    "glm_asr": (
        "GlmAsrForConditionalGeneration",
        {"audio_config": {"max_position_embeddings": 20, "intermediate_size": 256}},
    ),
    "smolvlm": ("SmolVLMForConditionalGeneration", {}),
    "internvl": ("InternVLForConditionalGeneration", {}),
    "llava": ("LlavaForConditionalGeneration", {}),
    # A tower for images of any size (Pixtral's), built for one.
    "mistral3": ("Mistral3ForConditionalGeneration", {}),
    # A table of positions that is sampled for the image's size.
    "glm4v": ("Glm4vForConditionalGeneration", {}),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", {}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}},
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {}),
    "t5": ("T5ForConditionalGeneration:gated", {}),
    "marian": ("MarianMTModel", {}),
    "bart": ("BartForConditionalGeneration", {}),
    "trocr": ("VisionEncoderDecoderModel", {}),
    "whisper": ("WhisperForConditionalGeneration", {}),
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
    case, changes = FAMILIES[name]
    cls = case.partition(":")[0]
    config = config_of(cls, {**OPTIONS.get(case, {}), **changes})
    for token in {"image_token_id", "image_token_index"} & vars(config).keys() or {"audio_token_id"}:
        setattr(config, token, IMAGE)
    torch.manual_seed(seed)
    return amplified(getattr(transformers, cls)(config).eval(), folder)
