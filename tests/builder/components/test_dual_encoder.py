"""Pairs of encoders (CLIP, SigLIP) as two parts, and their vision towers alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
import transformers

from trt_nvfp4.builder.components.check import computed_by, expected_of
from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.source import is_of_parts
from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.common.metrics import relative_error

from .test_families import exported

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**_SIZES, "vocab_size": 100, "max_position_embeddings": 24, "projection_dim": 16}
TEXT |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
VISION: dict[str, Any] = {**_SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 16}


def saved(name: str, folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(text_config=TEXT, vision_config=VISION)
    model = getattr(transformers, f"{name}Model")(config).eval()
    for parameter in model.parameters():  # SigLIP's own initialisation leaves nearly equal embeddings
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_text_and_vision(name: str, tmp_path: Path, seed: int) -> None:
    """Embeddings and their similarities are the model's; each part runs without the other."""
    model = saved(name, tmp_path / "m", seed)
    assert is_of_parts(tmp_path / "m")
    source = of_directory(tmp_path / "m", CacheOptions(), None)
    manifest = exported(source, tmp_path / "parts")
    expected = expected_of(source.example)
    found = computed_by(tmp_path / "parts", manifest, source.example, expected)
    assert relative_error(found=found, expected=expected) < 1e-4
    texts, images = [[0, 5, 9, 2], [0, 7, 2]], np.random.default_rng(seed).random((3, 3, 32, 32), np.float32)
    with Pipeline(tmp_path / "parts") as pipeline:
        pipeline._encoded = lambda *_: texts  # type: ignore[method-assign, assignment]
        words = pipeline.embed(["a", "b"])
        seen = pipeline.embed(images=images)
        both = pipeline.embed(["a", "b"], images)
        assert (words.keys(), seen.keys()) == ({"text_embeds"}, {"image_embeds"})
        np.testing.assert_array_equal(both["text_embeds"], words["text_embeds"])
        np.testing.assert_array_equal(both["image_embeds"], seen["image_embeds"])
        with pytest.raises(UsageError, match="expected float32"):
            pipeline.embed(images=images[:, :, :16])
        with pytest.raises(BuilderError, match="there is nothing to embed: give texts or images"):
            pipeline.embed()
        texts[0] = [0] * 25
        with pytest.raises(BuilderError, match="a text has 25 tokens, expected 1 to 24"):
            pipeline.embed(["a", "b"])
        del pipeline._encoded
        pipeline._ids = lambda *_: [0, 2]  # type: ignore[method-assign]
        assert len(pipeline.embed("a photo")["text_embeds"]) == 1  # and not its letters
        with pytest.raises(BuilderError, match="call run"):
            pipeline.generate([[1]])
    ids = torch.full((2, 24 if name == "Siglip" else 4), 1)
    ids[0, :4], ids[1, :3] = torch.tensor([0, 5, 9, 2]), torch.tensor([0, 7, 2])
    mask = torch.ones_like(ids) if name == "Siglip" else torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, pixel_values=torch.from_numpy(images))
    known = manifest.settings["embeds"]
    logits = known["scale"] * both["image_embeds"] @ both["text_embeds"].T + known["bias"]
    np.testing.assert_allclose(logits, whole.logits_per_image.numpy(), rtol=1e-3, atol=1e-4 * known["scale"])
    with pytest.raises(BuilderError, match="takes 32x32; leave it out"):
        of_directory(tmp_path / "m", CacheOptions(), "48x48")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel"])
def test_a_vision_tower_alone(name: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = getattr(transformers, name.partition("Vision")[0] + "VisionConfig")(**VISION)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path / "m")
    assert not is_of_parts(tmp_path / "m")
    runner = session(export(tmp_path / "m", tmp_path / "m.onnx", "auto"))
    pixels = np.random.default_rng(seed).random((3, 3, 32, 32), np.float32)
    with torch.no_grad():
        whole = model(pixel_values=torch.from_numpy(pixels))
    for port, found in zip(runner.get_outputs(), runner.run(None, {"pixel_values": pixels}), strict=True):
        np.testing.assert_allclose(found, whole[port.name].numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pair"),
    [("CLIPModel", True), ("Siglip2Model", True), ("VisionTextDualEncoderModel", True), ("LlavaModel", False)]
    + [(name, False) for name in ("Qwen2VLModel", "Gemma3Model", "Blip2Model", "Blip2ForImageTextRetrieval")],
)
def test_pairs_of_encoders(name: str, pair: bool, tmp_path: Path) -> None:
    """The inside of a model that generates from images has configurations of both, too."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": {}, "vision_config": {}}))
    (tmp_path / "model.safetensors").touch()
    assert is_of_parts(tmp_path) == pair
