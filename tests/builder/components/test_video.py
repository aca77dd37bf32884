"""Videos of vision-language models: a folder of frames, an animation or pixel values; tokens as transformers'."""

import json
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
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.settings import problems
from trt_nvfp4.builder.components.video import frames_of
from trt_nvfp4.builder.errors import USAGE, UsageError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, CacheOptions

from .families import IMAGE, amplified, config_of
from .small_options import OPTIONS
from .test_images import pixels, words

SIZE = (32, 48)
CLASSES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration"}
_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1], "tokens_per_second": 3}


def made(name: str, folder: Path, seed: int) -> Any:
    """A small model with an image processor, as parts in folder / "parts"."""
    cls = CLASSES[name]
    config = config_of(cls, {**OPTIONS[cls], "vision_config": _WINDOWS if name == "qwen2_5_vl" else {}})
    config.image_token_id, config.video_token_id = IMAGE, IMAGE - 1
    torch.manual_seed(seed)
    model = amplified(getattr(transformers, cls)(config).eval(), folder / "m")
    processor = transformers.Qwen2VLImageProcessor(patch_size=8, min_pixels=256, max_pixels=SIZE[0] * SIZE[1])
    processor.save_pretrained(folder / "m")
    words().save_pretrained(folder / "m")
    source = of_directory(folder / "m", CacheOptions(96, 2), "x".join(map(str, SIZE)))
    (folder / "parts").mkdir()
    parts = [part.export(source.name, folder / "parts") for part in source.parts]
    Manifest(source.task, parts, source.flows, source.settings, source.name).save(folder / "parts")
    copy_tokenizer(folder / "m", folder / "parts" / TOKENIZER)
    return model


def patches(frames: list[np.ndarray]) -> torch.Tensor:
    """[moments, patches, values] as transformers' video processors make them of pairs of frames; the last counts
    twice where there is one too few. The image processor scales the colours, frame by frame."""
    frames = [*frames, *frames[-1:] * (len(frames) % 2)]
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=8, temporal_patch_size=1, min_pixels=256, max_pixels=SIZE[0] * SIZE[1]
    )
    single = [torch.as_tensor(processor(images=[f], return_tensors="np")["pixel_values"]) for f in frames]
    rows = torch.stack(single).reshape(len(frames) // 2, 2, -1, 3, 8 * 8)
    return rows.permute(0, 2, 3, 1, 4).flatten(2)


def expected(model: Any, ids: list[int], frames: list[np.ndarray], fps: float, count: int) -> list[int]:
    moments = patches(frames)
    tokens = torch.tensor([ids])
    given = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values_videos": moments.flatten(0, 1),
        "video_grid_thw": torch.tensor([[len(moments), SIZE[0] // 8, SIZE[1] // 8]]),
        "mm_token_type_ids": 2 * (tokens == IMAGE - 1).int(),
    }
    if model.config.model_type == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([2 / fps])
    with torch.no_grad():
        found = model.generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens_found: list[int] = found[0, len(ids) :].tolist()
    return tokens_found


def positions_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Lists that get the positions of each step from now on, of transformers' model and of the parts: tokens of a small
    random model agree with wrong ones, too."""
    theirs: list[np.ndarray] = []
    ours: list[np.ndarray] = []
    whole = PartsRunner._positions

    def found(*arguments: Any) -> np.ndarray:
        ours.append(whole(*arguments))
        return ours[-1]

    def seen(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        theirs.append(options["position_ids"][-3:].numpy())

    monkeypatch.setattr(PartsRunner, "_positions", found)
    model.model.language_model.register_forward_pre_hook(seen, with_kwargs=True)
    return theirs, ours


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES])
def test_tokens_of_a_video(
    name: str, tmp_path: Path, rng: np.random.Generator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of seven frames, which are four moments, so far apart that time passes the height and the width."""
    model = made(name, tmp_path, seed)
    theirs, ours = positions_of(model, monkeypatch)
    frames = [pixels(rng, *SIZE) for _ in range(7)]
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        PIL.Image.fromarray(frame).save(tmp_path / "frames" / f"{number:05d}.png")
    features = 6 * 4
    text = [1, 7, *[IMAGE - 1] * features, 8, 9]
    with Pipeline(tmp_path / "parts") as pipeline:
        for fps in (1.5, 24):
            theirs.clear()
            wanted = expected(model, text, frames, fps, 6)
            for video in (tmp_path / "frames", frames, patches(frames).numpy().reshape(4, 24, -1)):
                for prompt in ([1, 7, IMAGE - 1, 8, 9], [1, 7, *[IMAGE] * features, 8, 9]):
                    ours.clear()
                    found = pipeline.generate([prompt], video=video, fps=fps, max_new_tokens=6, stop=())
                    assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
                    assert list(found.generations[0].token_ids) == wanted
        again = pipeline.generate([[1, IMAGE, 7]], images=[frames[0]], max_new_tokens=2, stop=())
        assert len(again.generations[0].prompt_ids) == 8
        bad: list[tuple[dict[str, Any], str]] = [
            ({"video": frames, "images": frames[:1]}, "a video takes the place of images"),
            ({"video": frames * 5}, "35 frames, and the model was built for 1 to 32"),
            ({"video": []}, "0 frames"),
            ({"video": frames, "fps": 0.0}, "--fps 0.0: expected frames per second, more than 0"),
        ]
        for arguments, message in bad:
            with pytest.raises(UsageError, match=message):
                pipeline.generate([[1, IMAGE - 1]], **arguments)
    options = [tmp_path / "parts", "--video", tmp_path / "frames", "--fps", "1.5", "--max-new-tokens", "6", "--json"]
    ran = invoked(generate.app, [*options, "--prompt", "w11 <image> this"])
    (shown,) = json.loads(ran.stdout)["generations"]
    ids = [IMAGE - 1 if token == IMAGE else token for token in shown["prompt_ids"]]
    assert shown["token_ids"] == expected(model, ids, frames, 1.5, 6)[: len(shown["token_ids"])]
    invoked(
        generate.app, [*options, "--image", "x.png", "--prompt", "<image>"], USAGE, "a video takes the place of images"
    )


def test_frames_of_an_animation(tmp_path: Path, rng: np.random.Generator) -> None:
    """Those that are seen at each of the moments asked for."""
    frames = [PIL.Image.fromarray(pixels(rng, 5, 7)) for _ in range(4)]
    durations = [300, 500, 100, 600]  # until 0.3, 0.8, 0.9 and 1.5 s
    frames[0].save(tmp_path / "v.png", save_all=True, append_images=frames[1:], duration=durations)
    for rate, seen in ((2, [0, 1, 3]), (0.5, [0]), (10, [0] * 3 + [1] * 5 + [2] + [3] * 6)):
        found = frames_of(tmp_path / "v.png", rate, 100)
        assert len(found) == len(seen)
        for frame, number in zip(found, seen, strict=True):
            np.testing.assert_array_equal(np.asarray(frame), np.asarray(frames[number]))
    with pytest.raises(UsageError, match=r"15 frames, and the model was built for 1 to 14; lower --fps"):
        frames_of(tmp_path / "v.png", 10, 14)
    (tmp_path / "v.mp4").write_bytes(rng.bytes(100))
    with pytest.raises(UsageError, match=r"v.mp4: Pillow cannot read this video .* ffmpeg -i v.mp4 -vf fps=2 frames/"):
        frames_of(tmp_path / "v.mp4", 2, 100)


@pytest.mark.parametrize(
    ("video", "message"),
    [
        ([], "lacks token_id, frames or per_second"),
        ({"token_id": -1, "frames": 2, "per_second": 2}, "token_id is -1"),
        ({"token_id": 1, "frames": 0, "per_second": 2}, "frames are 0"),
        ({"token_id": 1, "frames": 2, "per_second": float("nan")}, "per_second is nan"),
        ({"token_id": 1, "frames": 2, "per_second": "2"}, "per_second is '2'"),
    ],
)
def test_settings_of_a_video_that_are_none(video: object, message: str) -> None:
    image = {"token_id": 1, "tokens": 4, "grid": [1, 4, 4], "alone": True, "prompt": None}
    settings = {"image": image, "groups": None, "merge": 2, "video": video}
    assert any(message in problem for problem in problems(settings))
    assert not list(problems({**settings, "video": {"token_id": 1, "frames": 2, "per_second": None}}))
