"""Models of sound and detectors, tiny and with random weights: what their exports compute beside transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_weights import built, in_four_bits
from tiers import tiers

pytest.importorskip("transformers")

import transformers

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.fixed_sizes import FixedSizes, ImageSize
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.export.plain import check_kind
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.common.onnx_runtime import onnxruntime

_WAV2VEC2: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_PARAKEET = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "subsampling_conv_channels": 16,
    "num_mel_bins": 32,
}
_DETECTOR: dict[str, Any] = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 32, 32],
    "encoder_layers": 1,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 2,
    "d_model": 32,
    "num_queries": 20,
    "decoder_in_channels": [32] * 3,
    "decoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "num_denoising": 0,
    "num_labels": 5,
}
SOUND: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _WAV2VEC2),
    "wav2vec2 with norms of each step": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {**_WAV2VEC2, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "parakeet": (
        "ParakeetForCTC",
        "ParakeetCTCConfig",
        {"vocab_size": 33, "pad_token_id": 32, "encoder_config": _PARAKEET},
    ),
}


PIXELS = ("RTDetr", "RTDetrV2", "DFine", "RfDetr", "Sam2", "Sam2 encoder")


def initialized(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter) / 2)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_sound_of_any_length(name: str, tmp_path: Path, seed: int) -> None:
    cls, config, options = SOUND[name]
    torch.manual_seed(seed)
    model = initialized(getattr(transformers, cls)(getattr(transformers, config)(**options)))
    model.save_pretrained(tmp_path / "m")
    runs = onnxruntime.InferenceSession(export(tmp_path / "m", tmp_path / "m.onnx", "features"))
    sound, *masks = runs.get_inputs()
    assert bool(masks) == (name == "parakeet")
    assert [entry.name for entry in runs.get_outputs()] == ["logits"]
    for batch, length in ((3, 217), (1, 160)) if name == "parakeet" else ((3, 7001), (1, 4000)):
        shape = [{"batch": batch, "samples": length, "frames": length}.get(dim, dim) for dim in sound.shape]
        feed = {sound.name: np.random.default_rng(seed).random(shape, np.float32)}
        if masks:
            feed[masks[0].name] = np.ones((batch, length), np.int64)
            feed[masks[0].name][1:, -length // 3 :] = 0
        with torch.no_grad():
            expected = model(**{key: torch.from_numpy(value) for key, value in feed.items()}).logits.numpy()
        (found,) = runs.run(None, feed)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def pixels_of(name: str) -> tuple[str, Any]:
    """A class of models of images, and a small configuration."""
    if name == "RfDetr":
        dino = transformers.RfDetrDinov2Config(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            num_windows=2,
            out_features=["stage2", "stage4"],
        )
        heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "group_detr": 2}
        return "RfDetrForObjectDetection", transformers.RfDetrConfig(
            backbone_config=dino,
            d_model=32,
            num_queries=20,
            decoder_ffn_dim=64,
            decoder_layers=2,
            num_labels=5,
            **heads,
        )
    if name.startswith("Sam2"):
        hiera = transformers.Sam2HieraDetConfig(
            hidden_size=16,
            image_size=[64, 64],
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[16, 32, 64, 128],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[4, 4, 8, 4],
            global_attention_blocks=[3],
            window_positional_embedding_background_size=[4, 4],
        )
        vision = transformers.Sam2VisionConfig(
            backbone_config=hiera,
            fpn_hidden_size=32,
            backbone_channel_list=[128, 64, 32, 16],
            backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        )
        if name == "Sam2 encoder":
            return "Sam2VisionModel", vision
        prompts = transformers.Sam2PromptEncoderConfig(hidden_size=32, image_size=64)
        sizes = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
        masks = transformers.Sam2MaskDecoderConfig(**sizes)
        return "Sam2Model", transformers.Sam2Config(
            vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks
        )
    stages = {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "out_features": ["stage2", "stage3", "stage4"]}
    if name == "DFine":
        backbone: Any = transformers.HGNetV2Config(
            **stages,
            embedding_size=16,
            stem_channels=[3, 16, 16],
            stage_in_channels=[16, 16, 16, 32],
            stage_mid_channels=[8, 8, 16, 16],
            stage_out_channels=[16, 16, 32, 32],
            stage_num_blocks=[1] * 4,
            stage_numb_of_layers=[1] * 4,
        )
    else:
        backbone = transformers.RTDetrResNetConfig(**stages, embedding_size=16, layer_type="basic")
    return f"{name}ForObjectDetection", getattr(transformers, f"{name}Config")(backbone_config=backbone, **_DETECTOR)


def saved_of_pixels(name: str, folder: Path, exact: bool = False) -> tuple[Any, ImageSize]:
    """A model of images with random weights, which are `exact` in NVFP4, saved in `folder`; the size of its images."""
    cls, config = pixels_of(name)
    model = initialized(getattr(transformers, cls)(config))
    if exact:
        in_four_bits(model)
    with torch.no_grad():  # all places outside of the image have one score, and which of them TopK takes is open
        for part, parameter in model.named_parameters():
            if "enc_score_head.weight" in part or "enc_out_class_embed" in part:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return model, ImageSize(64, 64) if name.startswith("Sam2") else ImageSize(96, 128)


def check_outputs(runs: Any, model: Any, size: ImageSize, within: float) -> None:
    """The outputs of a session for two random images are the model's, but for the order of its queries."""
    pixels = torch.rand(2, 3, size.height, size.width)
    maps = "fpn_hidden_states"
    with torch.no_grad():
        if hasattr(model, "get_image_embeddings"):
            maps = "image_embeddings"
            result = {maps: model.get_image_embeddings(pixels)}
        else:
            result = model(pixel_values=pixels)
    expected = {part: result[part] for part in ("logits", "pred_boxes") if part in result}
    expected |= {f"{maps}.{n}": each for n, each in enumerate(result.get(maps, ()))}
    assert [entry.name for entry in runs.get_outputs()] == list(expected)
    for found, value in zip(runs.run(None, {"pixel_values": pixels.numpy()}), expected.values(), strict=True):
        # Queries of nearly equal scores may change places.
        theirs = np.sort(value.numpy().reshape(2, -1), 1)
        assert np.abs(np.sort(found.reshape(2, -1), 1) - theirs).max() <= within * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(PIXELS, slow=("RTDetr", "Sam2")))
def test_models_of_images_of_a_fixed_batch(name: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model, size = saved_of_pixels(name, tmp_path / "m")
    if name == "RTDetr":
        with pytest.raises(ModelFaultError, match=r"fixes the batch of .*; add --set batch=N"):
            export(tmp_path / "m", tmp_path / "m.onnx", "features", fixed=FixedSizes(size))
    path = export(tmp_path / "m", tmp_path / "m.onnx", "features", fixed=FixedSizes(size, 2))
    runs = onnxruntime.InferenceSession(path)
    assert runs.get_inputs()[0].shape == [2, 3, size.height, size.width]
    check_outputs(runs, model, size, 1e-3)


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_of_a_detector(tmp_path: Path, seed: int) -> None:
    """The engine holds the planned layers, and what it was built of computes transformers' logits and boxes."""
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    torch.manual_seed(seed)
    model, size = saved_of_pixels("RTDetrV2", tmp_path / "m", exact=True)
    sizes = {"image_size": f"{size.height}x{size.width}", "batch": 2}
    # One MLP reads the four numbers of a box, which are no block of 16.
    rewritten = built(tmp_path / "m", tmp_path, 5, "query_pos_head", task="features", **sizes)
    check_outputs(session(rewritten), model, size, 1e-3)


def test_sizes_that_do_not_apply(tmp_path: Path, seed: int) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)).save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError, match=r"image-size: .* takes input_ids and no images; leave it out"):
        export(tmp_path / "m", tmp_path / "m.onnx", "features", fixed=FixedSizes(ImageSize(96, 128)))
    with pytest.raises(UsageError, match=r"--task text: .*BertModel takes only text"):
        export(tmp_path / "m", tmp_path / "m.onnx", "text")


_PAIR: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60}
_PAIR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_PAIR |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        (
            "MT5",
            {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 60},
            "input_ids",
        ),
        ("Whisper", {**_PAIR, "num_mel_bins": 16, "max_source_positions": 80}, "input_features"),
        ("Bart", _PAIR, None),  # its code makes what the decoder reads of what the encoder does
    ],
)
def test_an_encoder_and_a_decoder_without_a_head(name: str, options: dict[str, Any], refused: str | None) -> None:
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    if refused is None:
        check_kind(Path("m"), model)
        return
    text = rf"m: {name}Model is an encoder and a decoder .* on only {refused}; .*, {name}ForConditionalGeneration, or"
    with pytest.raises(ModelFaultError, match=text):
        check_kind(Path("m"), model)


def test_a_class_that_follows_objects_through_a_video() -> None:
    with torch.device("meta"):
        model = transformers.Sam2VideoModel(transformers.Sam2VideoConfig())
    with pytest.raises(ModelFaultError, match=r"inference_session.*name Sam2Model in config\.json's architectures$"):
        check_kind(Path("m"), model)
