"""Configurations of transformers' models made small: every size by its name, in the model and in its parts."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

#: The token that decoders begin with behind an encoder.
START = 3
#: A size in front of the names that have it. Widths are alike in all parts, so that what joins them fits.
_TABLE = """
64 hidden_size d_model embed_dim out_hidden_size hidden_dim projection_dim text_hidden_size encoder_hidden_size
64 image_text_hidden_size projection_size vision_output_dim output_dim patch_embed_hidden_size adapter_out_dim
64 hidden_size_per_layer_input projector_input_dim projector_output_dim projector_hidden_size output_proj_dims
64 projection_hidden_size audio_hidden_size
128 intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim speech_encoder_intermediate_size mlp_dim
128 projection_intermediate_size expert_intermediate_size shared_experts_intermediate_size
32 moe_intermediate_size expert_ffn_size shared_expert_intermediate_size q_lora_rank kv_lora_rank
2 num_hidden_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth layers
2 n_layer speech_encoder_layers resampler_depth t2u_encoder_layers t2u_decoder_layers num_global_layers
2 encoder_num_hidden_layers decoder_num_hidden_layers num_experts_per_tok moe_k num_selected_experts
4 num_attention_heads num_heads encoder_attention_heads decoder_attention_heads speech_encoder_attention_heads
4 attention_heads n_head resampler_n_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
4 num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads
4 num_experts n_routed_experts num_local_experts moe_num_experts mm_tokens_per_image num_query_tokens
4 num_conv_pos_embedding_groups
16 head_dim d_kv resampler_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim global_head_dim
16 kv_channels num_mel_bins feature_size input_feat_per_channel num_position_embeddings query_pre_attn_scalar
16 num_conv_pos_embeddings
160 vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input
32 image_size resolution vision_image_size
8 patch_size
256 max_position_embeddings max_target_positions
20 max_source_positions
12 sliding_window
1 n_group topk_group n_shared_experts
"""
_SIZES = {name: int(size) for size, *names in map(str.split, _TABLE.strip().splitlines()) for name in names}
_GROUPED = (
    "num_key_value_heads",
    "num_kv_heads",
    "encoder_num_key_value_heads",
    "decoder_num_key_value_heads",
    "num_global_key_value_heads",
)
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": START}
#: Follow from sizes, and are made anew.
_DERIVED = ("layer_types", "mlp_layer_types", "rope_scaling", "no_rope_layers")
#: Nothing is drawn or dropped at random.
_OF_TRAINING = ("dropout", "layerdrop", "drop_path")


def small(value: Any, ids: Iterator[int]) -> Any:
    """The configuration as a dictionary, with sizes of this module; tokens with a meaning get ids from `ids`."""
    if not isinstance(value, Mapping):
        return value
    found: dict[Any, Any] = {}
    for name, entry in value.items():
        if name in _DERIVED:
            continue
        if not isinstance(name, str) or name.endswith(("2label", "2id")):
            found[name] = entry
            continue
        if name == "rope_parameters" and isinstance(entry, Mapping):
            found[name] = _small_rope(entry)
        elif isinstance(entry, Mapping):
            found[name] = small(entry, ids)
        elif name in _TOKENS:
            found[name] = _TOKENS[name]
        elif name.startswith("forced_") or name in ("suppress_tokens", "begin_suppress_tokens"):
            found[name] = None
        elif name.endswith(("token_id", "token_index")) and isinstance(entry, int) and entry >= 0:
            found[name] = next(ids)
        elif name in _GROUPED and entry is not None:
            found[name] = 2
        elif name in _SIZES and entry is not None:
            found[name] = _of_kind(entry, _SIZES[name])
        elif any(part in name for part in _OF_TRAINING) and isinstance(entry, float):
            found[name] = 0.0
        else:
            found[name] = entry
    return found


def _of_kind(entry: Any, size: int) -> Any:
    """A number, or as many of it as there were."""
    return type(entry)([size] * len(entry)) if isinstance(entry, (list, tuple)) else size


def _small_rope(entry: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(each, Mapping) for each in entry.values()):  # by kind of layer
        return {name: _small_rope(each) if isinstance(each, Mapping) else each for name, each in entry.items()}
    found = {"rope_type": "default", "rope_theta": 10000.0}
    if "mrope_section" in entry:
        found["mrope_section"] = [2, 3, 3]
        found |= {name: entry[name] for name in ("mrope_interleaved",) if name in entry}
    found |= {name: entry[name] for name in ("partial_rotary_factor",) if name in entry}
    return found


def merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `changes`, part by part."""
    found = dict(config)
    for name, change in changes.items():
        below = found.get(name)
        found[name] = merged(below, change) if isinstance(change, Mapping) and isinstance(below, dict) else change
    return found


def config_of(class_name: str, changes: Mapping[str, Any]) -> Any:
    """A small configuration of a model's class."""
    cls = getattr(transformers, class_name)
    config_class = cls.config_class
    whole = config_class(**changes.get("made_with", {})).to_dict()
    config = merged(small(whole, itertools.count(100)), {k: v for k, v in changes.items() if k != "made_with"})
    of_files = ("transformers_version", "model_type", "architectures")
    made = config_class(**{name: value for name, value in config.items() if name not in of_files})
    if getattr(made, "is_encoder_decoder", False):
        made.decoder_start_token_id = START
    return made
