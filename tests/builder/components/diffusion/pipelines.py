"""Small diffusers pipelines with random weights, by the names of their families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: Widths of text and blocks.
WIDTH, HEADS = 64, 4
_VOCABULARY = 260
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_BLOCKS = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}


def _tokenizer(longest: int) -> Any:
    """Bytes as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=longest,
        chat_template="{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}",
    )


def _clip(projected: bool = False) -> Any:
    config = transformers.CLIPTextConfig(**{**_TEXT, "max_position_embeddings": 77, "projection_dim": WIDTH})
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def _t5(kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=_VOCABULARY, d_model=WIDTH, d_ff=2 * WIDTH, d_kv=16, num_layers=2, num_heads=HEADS,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, f"{kind}EncoderModel")(config)


def _autoencoder(channels: int, **options: Any) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        sample_size=32,
        **options,
    )


def _flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8), **_BLOCKS,
    )  # fmt: skip
    autoencoder = _autoencoder(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1)
    return diffusers.FluxPipeline(_flow(), autoencoder, _clip(), _tokenizer(77), _t5(), _tokenizer(128), transformer)


def flux2() -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=3 * WIDTH, mlp_ratio=2.0,
        timestep_guidance_channels=WIDTH, axes_dims_rope=(4, 4, 4, 4), **_BLOCKS,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=32,
    )  # fmt: skip
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_DECODER, "num_hidden_layers": 28}))
    return diffusers.Flux2KleinPipeline(_flow(), autoencoder, encoder, _tokenizer(1024), transformer, is_distilled=True)


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=WIDTH * 2,
        caption_projection_dim=WIDTH, pooled_projection_dim=WIDTH * 2, pos_embed_max_size=32, qk_norm="rms_norm",
        **_BLOCKS,
    )  # fmt: skip
    encoder = _t5()
    encoder.config.d_model = WIDTH
    big = transformers.T5Config(
        vocab_size=_VOCABULARY, d_model=2 * WIDTH, d_ff=2 * WIDTH, d_kv=16, num_layers=1, num_heads=HEADS,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer, _flow(), _autoencoder(4, shift_factor=0.1), _clip(True), _tokenizer(77), _clip(True),
        _tokenizer(77), transformers.T5EncoderModel(big), _tokenizer(128),
    )  # fmt: skip


def z_image() -> Any:
    # The MLP has 8/3 as many hidden values: of 96 a number that NVFP4's blocks divide.
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=96, n_layers=2, n_refiner_layers=1, n_heads=HEADS, n_kv_heads=HEADS, cap_feat_dim=WIDTH,
        axes_dims=[8, 8, 8], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**_DECODER))
    return diffusers.ZImagePipeline(_flow(), _autoencoder(4, shift_factor=0.1), encoder, _tokenizer(512), transformer)


def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        **_BLOCKS,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False], latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )  # fmt: skip
    text = {**_DECODER, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH}
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )
    return diffusers.QwenImagePipeline(_flow(), autoencoder, encoder, _tokenizer(1024), transformer)


def sana() -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=HEADS, attention_head_dim=16,
        num_cross_attention_heads=HEADS, cross_attention_head_dim=16, cross_attention_dim=WIDTH, caption_channels=WIDTH,
        sample_size=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.4,
    )  # fmt: skip
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**{**_DECODER, "query_pre_attn_scalar": 16}))
    return diffusers.SanaPipeline(_tokenizer(512), encoder, autoencoder, transformer, _flow())


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=2, in_channels=4, out_channels=8, cross_attention_dim=WIDTH,
        caption_channels=WIDTH, norm_type="ada_norm_single", use_additional_conditions=False, **_BLOCKS,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        _tokenizer(300), _t5(), _autoencoder(4), transformer, diffusers.DPMSolverMultistepScheduler()
    )


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=WIDTH, ffn_dim=2 * WIDTH, num_layers=2,
        rope_max_seq_len=32,
        **_BLOCKS,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return diffusers.WanPipeline(_tokenizer(512), _t5("UMT5"), autoencoder, _flow(shift=3.0), transformer)


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, cross_attention_dim=WIDTH, caption_channels=WIDTH, num_layers=2, **_BLOCKS
    )
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1), patch_size=1,
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    autoencoder.use_framewise_encoding = autoencoder.use_framewise_decoding = False
    return diffusers.LTXPipeline(_flow(), autoencoder, _t5(), _tokenizer(128), transformer)


def hunyuan_video() -> Any:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1,
        patch_size_t=1, guidance_embeds=True, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH,
        rope_axes_dim=(4, 4, 8), **_BLOCKS,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
        spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
    )  # fmt: skip
    encoder = transformers.LlamaModel(transformers.LlamaConfig(**{**_DECODER, "num_hidden_layers": 3}))
    return diffusers.HunyuanVideoPipeline(
        encoder, _tokenizer(512), transformer, autoencoder, _flow(shift=7.0), _clip(), _tokenizer(77)
    )


def sdxl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=48 + WIDTH, cross_attention_dim=2 * WIDTH, norm_num_groups=8,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        _autoencoder(4), _clip(), _clip(True), _tokenizer(77), _tokenizer(77), unet, diffusers.EulerDiscreteScheduler()
    )


_VIDEO = "num_frames=5"
#: Family -> what makes the pipeline, its size of pictures, and other arguments that it is called with.
FAMILIES: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "flux": (flux, "32x48", "max_sequence_length=32"),
    "flux2": (flux2, "32x48", "max_sequence_length=64"),
    "sd3": (sd3, "32x48", "max_sequence_length=32"),
    "z_image": (z_image, "32x48", None),
    "qwen_image": (qwen_image, "32x48", None),
    "sana": (sana, "32x64", "max_sequence_length=32,use_resolution_binning=false"),
    "pixart": (pixart, "32x48", "max_sequence_length=32,use_resolution_binning=false"),
    "wan": (wan, "32x48", f"{_VIDEO},max_sequence_length=32"),
    "ltx": (ltx, "32x64", "num_frames=9,max_sequence_length=32"),
    "hunyuan_video": (hunyuan_video, "32x48", f"{_VIDEO},max_sequence_length=32"),
    "sdxl": (sdxl, "32x48", None),
}


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    """The pipeline, whose directory is `folder`. Random weights are enlarged, so that every layer counts."""
    torch.manual_seed(seed)
    pipeline = FAMILIES[name][0]()
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(2)
            module.to(dtype).eval()
    pipeline.save_pretrained(folder)
    return pipeline
