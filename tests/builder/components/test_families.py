"""Small models with random weights: the chain of parts in ONNX Runtime computes what transformers computes."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from tiers import tiers

pytest.importorskip("transformers")

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.components import vision_language
from trt_nvfp4.builder.components.check import computed_by, expected_of
from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.parts import described
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.source import Source, is_of_parts
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UnavailableError, UsageError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.generate.loop import generate_ids
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.common.onnx_runtime import onnxruntime

from .families import FAMILIES, IMAGE, saved

NEW_TOKENS = 6
# One of each kind of tower, mask and join; the others have code like theirs.
SLOW = ("paligemma", "gemma3", "llava_onevision", "qwen3_vl", "t5", "trocr", "whisper")


def size_of(name: str) -> str | None:
    return "32x48" if name.startswith(("qwen2_5", "qwen3_vl", "mistral", "glm4v", "gemma4")) else None


def exported(source: Source, folder: Path) -> Manifest:
    folder.mkdir()
    parts = [part.export(source.name, folder) for part in source.parts]
    manifest = Manifest(source.task, parts, source.flows, source.settings, source.name).check()
    manifest.save(folder)
    return manifest


@pytest.mark.parametrize("name", tiers(FAMILIES, slow=SLOW))
def test_the_chain_computes_what_the_model_does(name: str, tmp_path: Path, seed: int) -> None:
    """Logits of prompts of different lengths with images among the text, or sources of different lengths, and of the
    tokens that follow; then tokens from the pipeline, which are the model's own."""
    model = saved(name, tmp_path / name, seed)
    assert is_of_parts(tmp_path / name)
    source = of_directory(tmp_path / name, CacheOptions(64, 2), size_of(name))
    manifest = exported(source, tmp_path / "parts")
    expected = expected_of(source.example)
    found = computed_by(tmp_path / "parts", manifest, source.example, expected)
    assert relative_error(found=found, expected=expected) < 1e-4
    prompts = [list(prompt) for prompt in source.example.prompts]
    with Pipeline(tmp_path / "parts") as pipeline:
        result = pipeline.generate(**given(source, prompts), max_new_tokens=NEW_TOKENS, stop=[IMAGE])
    assert len(result.generations) == len(prompts)
    assert source.example.logits is not None
    for number, generation in enumerate(result.generations):
        tokens = list(generation.prompt_ids)
        for token in generation.token_ids:
            with torch.no_grad():
                row = source.example.logits(number, tokens)
            # Nearly equal logits may change places.
            assert token == row.argmax() or row[token] > row.max() - 1e-4 * np.abs(row).max()
            tokens.append(token)
    if name in ("paligemma", "trocr"):
        with Pipeline(tmp_path / "parts", runner="torch") as pipeline:
            again = pipeline.generate(**given(source, prompts), max_new_tokens=NEW_TOKENS, stop=[IMAGE])
        assert [each.token_ids for each in again.generations] == [each.token_ids for each in result.generations]
    if hasattr(model, "generation_config") and "image" in manifest.settings:
        assert all(IMAGE in generation.prompt_ids for generation in result.generations)


def test_an_adapter_is_merged_before_the_model_is_taken_apart(tmp_path: Path, seed: int) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        saved("t5", tmp_path / "t5", seed), peft.LoraConfig(r=2, target_modules=["q", "wo"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    options = CacheOptions(64, 2)
    merged = of_directory(tmp_path / "merged", options, None)
    found = of_directory(tmp_path / "t5", options, None, adapter=Adapter(tmp_path / "adapter"))
    plain = of_directory(tmp_path / "t5", options, None)
    changed = 0
    for own, whole, before in zip(found.parts, merged.parts, plain.parts, strict=True):
        weights, unchanged = whole.module.state_dict(), before.module.state_dict()
        for key, value in own.module.state_dict().items():
            torch.testing.assert_close(value, weights[key], rtol=1e-6, atol=1e-6, msg=key)
            changed += not torch.equal(value, unchanged[key])
    assert changed


def given(source: Source, prompts: list[list[int]]) -> dict[str, Any]:
    inputs = source.example.inputs
    if source.settings.get("hears"):
        sound = inputs["input_features"]
        return {"prompts": prompts, "sound": sound[None] if source.settings["image"]["alone"] else sound}
    if "image" in source.settings:
        pixels = inputs["pixel_values"]
        return {"prompts": prompts, "images": pixels[None] if source.settings["image"]["alone"] else pixels}
    if "pixel_values" in inputs:
        return {"images": inputs["pixel_values"], "start_tokens": prompts[1]}
    if "input_features" in inputs:
        return {"sound": inputs["input_features"], "start_tokens": prompts[1]}
    lengths = inputs["attention_mask"].sum(1)
    return {
        "prompts": [row[:length].tolist() for row, length in zip(inputs["input_ids"], lengths, strict=True)],
        "start_tokens": prompts[1],
    }


@pytest.mark.slow
def test_images_of_another_size_and_prompts_of_another_number(tmp_path: Path, seed: int) -> None:
    saved("paligemma", tmp_path / "m", seed)
    with pytest.raises(UsageError, match=r"--set image-size=48x48: the vision tower of .* takes 32x32"):
        of_directory(tmp_path / "m", CacheOptions(64), "48x48")
    with pytest.raises(BuilderError, match="allows for 256 tokens"):
        of_directory(tmp_path / "m", CacheOptions(512), None)
    source = of_directory(tmp_path / "m", CacheOptions(64), None)
    exported(source, tmp_path / "parts")
    pixels = source.example.inputs["pixel_values"][:1]
    with Pipeline(tmp_path / "parts") as pipeline:
        once = pipeline.generate([[1, IMAGE, 5]], images=pixels, max_new_tokens=2, stop=())
        assert once.generations[0].prompt_ids == [1, *[IMAGE] * 16, 5]
        assert pipeline.generate([[1, 5]], max_new_tokens=2, stop=()).generations[0].token_ids
        bad: list[tuple[dict[str, Any], str]] = [
            ({"prompts": [[1, 5]], "images": pixels}, "expected it 1 times, or 16 times"),
            ({"prompts": [[1, IMAGE]], "images": pixels[:, :, :16]}, r"pixel_values is float32 \[1, 3, 16, 32\]"),
            (
                {"prompts": [[1, IMAGE]], "images": pixels[0]},
                r"images are \[3, 32, 32\], expected \[count, 3, 32, 32\]",
            ),
            ({"prompts": [[1, 5]], "sound": pixels}, "takes no sound"),
        ]
        for arguments, message in bad:
            with pytest.raises(UsageError, match=message):
                pipeline.generate(**arguments)
        with pytest.raises(BuilderError, match="call generate"):
            pipeline.run({})
        assert pipeline._runner is not None
        pipeline._runner.longest_step = 17  # as of an engine built for short prompts
        with pytest.raises(BuilderError, match=r"18 tokens, .* takes 17: such a prompt cannot be taken in pieces"):
            pipeline.generate([[1, IMAGE, 5]], images=pixels, max_new_tokens=2, stop=())
    (tmp_path / "parts" / "embed.onnx").unlink()
    with pytest.raises(ModelFaultError, match=r"the part 'embed' is missing \(embed.rewritten.onnx\)"):
        Pipeline(tmp_path / "parts")


def test_a_cache_of_another_length_does_not_fit(tmp_path: Path, rng: np.random.Generator) -> None:
    """Parts of two builds put together."""
    parts = [
        described("decoder", TinyDecoder(rng, capacity=capacity).save(tmp_path / "decoder.onnx"))
        for capacity in (16, 24)
    ]
    Manifest("generate", parts[:1]).save(tmp_path)
    with pytest.raises(ModelFaultError, match=r"\[batch, 2, 24, 8\], and components.json says .*\[batch, 2, 16, 8\]"):
        Pipeline(tmp_path)


@pytest.mark.parametrize("size", ["40x40", "32x47"])
def test_a_size_that_patches_do_not_fill(tmp_path: Path, seed: int, size: str) -> None:
    saved("qwen2_5_vl", tmp_path / "m", seed)
    with pytest.raises(BuilderError, match=f"--set image-size={size}: this vision tower takes multiples of 16"):
        of_directory(tmp_path / "m", CacheOptions(64), size)


def test_an_image_that_fills_the_cache(tmp_path: Path, seed: int) -> None:
    """Tiles of a large image are more tokens than the cache holds: 16 of the whole, and of four tiles, 8 patches square
    together, the 6 rows that are not padding, with one token for each row's end."""
    saved("llava_onevision", tmp_path / "m", seed)
    with pytest.raises(UsageError, match=r"--cache-capacity 64: one image of .* is 70 tokens, .* name 78 or"):
        of_directory(tmp_path / "m", CacheOptions(64), "40x60")


@pytest.mark.parametrize(
    ("name", "replaced", "message"),
    [
        ("create_masks_for_generate", lambda **_: {}, "has a rule of its own for which tokens see each other"),
        (
            "get_image_features",
            lambda _self, pixel_values, spatial_shapes, image_grid_thw=None: pixel_values,
            "takes spatial_shapes and image_grid_thw beside images",
        ),
        (
            "model.get_image_features",
            lambda _self, pixel_values, target_sizes: pixel_values,
            "encoder of Llava.* takes target_sizes beside images",
        ),
    ],
    ids=["mask", "further inputs", "further inputs of the inside"],
)
def test_models_of_another_kind(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, name: str, replaced: Any, message: str
) -> None:
    model = saved("llava", tmp_path / "m", seed)
    part = model.model if name.startswith("model.") else model
    monkeypatch.setattr(type(part), name.removeprefix("model."), replaced, raising=False)
    with pytest.raises(ModelFaultError, match=message):
        of_directory(tmp_path / "m", CacheOptions(64), None)


@pytest.mark.parametrize("name", ["llava", "t5"])
def test_an_onnx_runtime_without_the_operators_of_caches(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is told before the parts are exported."""
    saved(name, tmp_path / "m", seed)
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    with pytest.raises(UnavailableError, match=r"m: ONNX Runtime 1\.23\.2 is too old for models with caches"):
        of_directory(tmp_path / "m", CacheOptions(64), None)


@pytest.mark.parametrize(
    ("raised", "kept"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (KeyError("pooler_output\nand more"), False),
    ],
    ids=["disk", "memory", "CUDA", "modeling code"],
)
def test_what_is_not_the_models_fault_is_not_blamed_on_it(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, raised: Exception, kept: bool
) -> None:
    saved("paligemma", tmp_path / "m", seed)
    monkeypatch.setattr(vision_language, "parts_of", Mock(side_effect=raised))
    with pytest.raises(type(raised) if kept else BuilderError) as failure:
        of_directory(tmp_path / "m", CacheOptions(64), None)
    assert (failure.value is raised) == kept
    if not kept:
        assert str(failure.value).endswith(r"KeyError: 'pooler_output\nand more'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("gemma3", "gemma4_per_layer", "voxtral"))],
)
def test_the_language_model_of_one_that_takes_images(name: str, tmp_path: Path, seed: int) -> None:
    """`--task text`: one graph with caches, of whose weights none belong to the encoder; tokens are the model's own."""
    model = saved(name, tmp_path / "m", seed)
    assert not is_of_parts(tmp_path / "m", "text")
    path = export(tmp_path / "m", tmp_path / "m.onnx", "text", CacheOptions(64, 2))
    graph = onnx.load(path).graph
    assert not any("visi" in tensor.name or "audio" in tensor.name for tensor in graph.initializer)
    runner = OnnxRunner(path)
    prompts = [[5, 9, 33, 7, 60], [4, 8]]
    found: list[list[int]] = [[], []]
    for step in generate_ids(runner, prompts, NEW_TOKENS, Sampling(), []):
        for token in step:
            found[token.sequence].append(token.id)
    for prompt, tokens in zip(prompts, found, strict=True):
        for place, token in enumerate(tokens):
            with torch.no_grad():
                row = model(input_ids=torch.tensor([prompt + tokens[:place]]), use_cache=False).logits[0, -1]
            assert token == row.argmax() or row[token] > row.max() - 1e-4 * row.abs().max()
