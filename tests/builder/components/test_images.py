"""Images and prompts as they come: what the manifest describes is what the model's own processor does."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_lines import invoked

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import PIL.Image
import transformers

from trt_nvfp4.builder.cli import generate
from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.images import KERNELS, Preprocessing, opened, resized
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.processor import describe
from trt_nvfp4.builder.components.prompts import with_features
from trt_nvfp4.builder.errors import USAGE, ModelFaultError, UsageError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, CacheOptions
from trt_nvfp4.common import tokenizers

from .families import IMAGE, saved

RESAMPLING = {"bilinear": 2, "bicubic": 3, "lanczos": 1}


def pixels(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("resample", KERNELS)
@pytest.mark.parametrize("size", [(7, 5), (32, 48), (97, 33), (200, 1)])
def test_images_are_resized_as_pillow_does(rng: np.random.Generator, resample: str, size: tuple[int, int]) -> None:
    image = pixels(rng, 61, 40)
    expected = PIL.Image.fromarray(image).resize(size[::-1], resample=RESAMPLING[resample])
    found = resized(image.astype(np.float64), *size, resample)
    assert found.shape == (*size, 3)
    # Pillow's weights are fixed-point numbers.
    assert np.abs(found - np.asarray(expected, np.float64)).max() <= 1


PROCESSORS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "siglip": ("SiglipImageProcessor", {"size": {"height": 32, "width": 48}}, False),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}, False),
    "gemma3": ("Gemma3ImageProcessor", {"size": {"height": 32, "width": 32}}, False),
    "qwen2_vl": ("Qwen2VLImageProcessor", {"patch_size": 8, "min_pixels": 256, "max_pixels": 32 * 48}, True),
    "raw": ("SiglipImageProcessor", {"size": {"height": 16, "width": 16}, "do_normalize": False}, False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixel_values_are_the_processors(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """On images of other sizes than the one that was tried when the model was built."""
    cls, options, patched = PROCESSORS[name]
    processor = getattr(transformers, cls)(**options)
    processor.save_pretrained(tmp_path)
    size = (32, 48) if patched or name == "siglip" else (16, 16) if name == "raw" else (32, 32)
    found = describe(tmp_path, size, patched, None)
    assert found.reason is None
    assert found.preprocessing is not None
    again = Preprocessing.of(json.loads(json.dumps(found.preprocessing.json())))
    # A processor of patches chooses the size by the image's own shape.
    shapes = [(64, 96), (128, 192)] if patched else [(40, 61), (90, 31), (32, 32)]
    for shape in shapes:
        image = pixels(rng, *shape)
        theirs = np.asarray(processor(images=[image], return_tensors="np")["pixel_values"], np.float32)
        ours = again(PIL.Image.fromarray(image))
        steps = np.abs(ours - theirs.reshape(ours.shape)) / (again.scale / min(again.std))
        assert steps.mean() < 0.5
        # Where noise overshoots, in another order of the two passes; CLIP's reached 20.4 in 180 draws, all others 6.6.
        assert steps.max() < (24 if name == "clip" else 16)


def words() -> Any:
    """A tokenizer of words, with the token of an image."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<pad>", "<bos>", "<eos>", "<unk>", "USER", "ASSISTANT", ":", "what", "is", "this", "MARK"]
    known += [f"w{number}" for number in range(len(known), IMAGE)]
    vocabulary = {word: number for number, word in enumerate([*known, "<image>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<image>"])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


CHAT = (
    "{% for m in messages %}USER : {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}ASSISTANT :"
)


def save_processor(name: str, folder: Path) -> Any:
    """A PaliGemma processor, or LLaVA's with a chat template, for images of 32x32 in patches of 8."""
    if name == "paligemma":
        images = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
        images.image_seq_length = 16
        processor = transformers.PaliGemmaProcessor(images, words())
    else:
        size = {"shortest_edge": 32}, {"height": 32, "width": 32}
        images = transformers.CLIPImageProcessor(size=size[0], crop_size=size[1])
        processor = transformers.LlavaProcessor(
            images,
            words(),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=CHAT,
        )
    processor.save_pretrained(folder)
    return processor


@pytest.mark.parametrize("name", ["paligemma", "llava"])
def test_prompts_are_put_as_the_processor_does(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The image's token stands once where the processor repeats it; another text than the one that was tried."""
    processor = save_processor(name, tmp_path)
    around = describe(tmp_path, (32, 32), False, IMAGE).prompt
    assert around is not None
    text = "what is this"
    if name == "llava":
        content = [{"type": "image"}, {"type": "text", "text": text}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(text=[text], images=[pixels(rng, 32, 32)])["input_ids"][0]
    ours = processor.tokenizer("what is this".join(around), add_special_tokens=False)["input_ids"]
    assert list(with_features([ours], 1, IMAGE, 16)) == [list(theirs)]


@pytest.mark.parametrize("text", ["'x' * 200", "10 ** (10 ** 10)"], ids=["tokenizer", "template"])
def test_processors_without_an_end(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the prompt undescribed."""
    from tokenizers import Regex, pre_tokenizers

    monkeypatch.setattr(tokenizers, "_SECONDS", 2)
    processor = save_processor("llava", tmp_path)
    processor.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    processor.chat_template = "{{ " + text + " }}" + CHAT
    processor.save_pretrained(tmp_path)
    found = describe(tmp_path, (32, 32), False, IMAGE)
    assert found.preprocessing is not None
    assert found.prompt is None


@pytest.mark.slow
def test_an_image_file_and_a_prompt_become_text(tmp_path: Path, rng: np.random.Generator, seed: int) -> None:
    """By the command, against transformers' own processor and model."""
    model, folder = saved("paligemma", tmp_path / "m", seed), tmp_path / "parts"
    processor = save_processor("paligemma", tmp_path / "m")
    source = of_directory(tmp_path / "m", CacheOptions(64), None)
    folder.mkdir()
    parts = [part.export(source.name, folder) for part in source.parts]
    Manifest(source.task, parts, source.flows, source.settings, source.name).save(folder)
    copy_tokenizer(tmp_path / "m", folder / TOKENIZER)
    PIL.Image.fromarray(pixels(rng, 45, 70)).save(tmp_path / "image.png")
    arguments = [str(folder), "--image", str(tmp_path / "image.png"), "--prompt", "what is this", "--json"]
    ran = invoked(generate.app, [*arguments, "--max-new-tokens", "3"])
    (found,) = json.loads(ran.stdout)["generations"]
    given = processor(text=["what is this"], images=[PIL.Image.open(tmp_path / "image.png")], return_tensors="pt")
    assert found["prompt_ids"] == given["input_ids"][0].tolist()
    with torch.no_grad():
        row = model(**given).logits[0, -1]
    # Pixels may differ by a rounding.
    assert row[found["token_ids"][0]] >= row.max() - 0.05 * row.abs().max()
    for change, message in (
        (["--chat"], "--chat: .* is a folder with a model's parts"),
        (["--stream"], "--stream: .* shows all at the end"),
        (["--image", "absent.png"], "absent.png: Pillow cannot read this image"),
    ):
        refused = invoked(generate.app, [*arguments, *change], USAGE)
        assert re.search(message, " ".join(refused.output.split())), refused.output


def test_what_is_not_described_says_why(tmp_path: Path) -> None:
    assert describe(tmp_path, (32, 32), False, None).reason == f"{tmp_path.name} has no preprocessor_config.json"
    transformers.SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    reason = describe(tmp_path, (32, 32), False, None).reason
    assert reason is not None
    assert "gives [1, 3, 24, 24], expected [3, 32, 32]" in reason
    assert "in tiles" in str(describe(tmp_path, None, False, None).reason)
    transformers.SiglipImageProcessor(size={"height": 10**6, "width": 10**6}).save_pretrained(tmp_path)
    assert "memory" in str(describe(tmp_path, (32, 32), False, None).reason)
    (tmp_path / "preprocessor_config.json").write_text("[")
    assert describe(tmp_path, (32, 32), False, None).preprocessing is None


def test_files_and_what_is_no_image(tmp_path: Path, rng: np.random.Generator) -> None:
    image = pixels(rng, 9, 5)
    PIL.Image.fromarray(image).save(tmp_path / "image.png")
    np.testing.assert_array_equal(opened(tmp_path / "image.png"), image)
    np.testing.assert_array_equal(opened(str(tmp_path / "image.png")), image)
    np.testing.assert_array_equal(opened(image[..., 0]), np.repeat(image[..., :1], 3, 2))
    (tmp_path / "text.png").write_text("no image")
    bad: list[tuple[Any, str]] = [
        (tmp_path / "text.png", "Pillow cannot read this image"),
        (tmp_path / "absent.png", "absent.png: Pillow cannot read this image"),
        (image.astype(np.float32), r"an image is float32 \[9, 5, 3\], expected uint8"),
        (image[None], r"an image is uint8 \[1, 9, 5, 3\]"),
        (image[:0], r"an image is uint8 \[0, 5, 3\]"),
    ]
    for given, message in bad:
        with pytest.raises(UsageError, match=message):
            opened(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resample": "nearest"}, "resample is 'nearest'"),
        ({"mean": [0.5]}, "for each of three channels"),
        ({"height": 0}, "a size is 0, expected 1 to 8192"),
        ({"odd": 1}, "odd"),
        ({"scale": 10**400}, "too large"),
        ({"mean": [0.5, 0.5, 10**400]}, "too large"),
        ({"patches": {"size": 3, "merge": 1, "temporal": 2}}, "images of 8x8 are not filled by squares of 3x3"),
        ({"patches": {"size": 4, "merge": 4, "temporal": 2}}, "images of 8x8 are not filled by squares of 16x16"),
        ({"width": 12, "patches": {"size": 4, "merge": 2, "temporal": 2}}, "images of 8x12 are not filled"),
        ({"patches": {"size": 4, "merge": 2, "temporal": 65}}, "a size is 65, expected 1 to 64"),
        ({"patches": [4, 2, 2]}, "mapping"),
    ],
)
def test_a_description_that_is_none(change: dict[str, Any], message: str) -> None:
    good = Preprocessing(8, 8, "bicubic", 1 / 255, [0.5] * 3, [0.5] * 3).json()
    with pytest.raises(ModelFaultError, match=f"preprocessing of images cannot be read .*{message}"):
        Preprocessing.of(good | change)
