"""Describes a directory's processor of images and prompts, so that the device needs no transformers for it.

A description is kept only where it gives the same as the processor itself, on an image and a prompt that are tried.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.images import Patches, Preprocessing
from trt_nvfp4.builder.export.huggingface import quiet
from trt_nvfp4.common.limited import LimitError, limited
from trt_nvfp4.common.tokenizers import TemplateError, no_panics, render_chats, tokenized

#: One image is one run of the encoder: no tiles beside the whole image.
_WHOLE = {"do_image_splitting": False, "crop_to_patches": False, "do_pan_and_scan": False}
_PILLOW = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
#: Steps of 8-bit values by which resizing here and there may round differently, on average.
_STEPS = 0.5
_MARK = "MARK"
# Limit for one image; normally under a second.
_SECONDS = 60.0
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Described:
    """`preprocessing`: None where `reason` says why. `prompt`: the text before and behind a prompt with one image, with
    the image's token once; None where the processor gave none."""

    preprocessing: Preprocessing | None
    prompt: tuple[str, str] | None
    reason: str | None = None

    def settings(self) -> dict[str, Any]:
        """The manifest's."""
        return {
            "preprocessing": None if self.preprocessing is None else self.preprocessing.json(),
            "no_preprocessing": self.reason,
        }


def describe(directory: Path, size: tuple[int, int] | None, patched: bool, image_token: int | None) -> Described:
    """The processor of a model's directory, for an encoder of images of `size`, or of their patches. No code of the
    directory runs.

    `size`: None where the encoder takes several tiles of one image. `image_token`: of a language model's prompts.
    """
    if not any((directory / name).is_file() for name in _FILES):
        return Described(None, None, f"{directory.name} has no {_FILES[0]}")
    if size is None:
        return Described(None, None, "the encoder takes an image in tiles")
    with quiet():
        try:
            processor = _loaded(directory)
            own = getattr(processor, "image_processor", processor)
            preprocessing = _stated(own, size, patched)
            image = _trial(size)
            limited(lambda: _compare(own, image, preprocessing), _SECONDS)
        except LimitError as error:  # what `_compare` says, or there is no end to what the processor does
            return Described(None, None, f"{error}".splitlines()[0])
        # transformers raises many kinds for a broken or missing processor, and each processor has rules of its own.
        except Exception as error:
            return Described(None, None, f"{type(error).__name__}: {error}".splitlines()[0])
        try:
            prompt = None if image_token is None else _prompt(processor, image, image_token)
        except Exception:  # as above, or it comes to no end; prompts then name the image's token themselves
            prompt = None
    return Described(preprocessing, prompt)


def _loaded(directory: Path) -> Any:
    import transformers

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with no_panics():
            return transformers.AutoProcessor.from_pretrained(directory, **options)
    except Exception:  # of a directory with only an image processor
        return transformers.AutoImageProcessor.from_pretrained(directory, **options)


def _known(own: Any) -> dict[str, Any]:
    return {name: value for name, value in _WHOLE.items() if hasattr(own, name)}


def _stated(own: Any, size: tuple[int, int], patched: bool) -> Preprocessing:
    """The processor's attributes as a description. Raises ValueError for what has no description here."""
    resample = _PILLOW.get(int(own.resample))
    if resample is None:
        raise ValueError(f"resampling {own.resample!r} is not described")
    mean, std = (list(own.image_mean), list(own.image_std)) if own.do_normalize else ([0.0] * 3, [1.0] * 3)
    patches = None
    if patched:
        patches = Patches(own.patch_size, own.merge_size, own.temporal_patch_size)
    return Preprocessing(
        *size,
        resample,
        float(own.rescale_factor) if own.do_rescale else 1.0,
        mean,
        std,
        own.size["shortest_edge"] if getattr(own, "do_center_crop", False) and "shortest_edge" in own.size else None,
        patches,
    )


def _trial(size: tuple[int, int]) -> np.ndarray:
    """uint8 [., ., 3] with structure at several scales, twice as large as the encoder's images."""
    height, width = size
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (-(-2 * height // 8), -(-2 * width // 8), 3))
    noise = rng.integers(-8, 8, (2 * height, 2 * width, 3))
    smooth = np.repeat(np.repeat(coarse, 8, 0), 8, 1)[: 2 * height, : 2 * width]
    found: np.ndarray = np.clip(smooth + noise, 0, 255).astype(np.uint8)
    return found


def _compare(own: Any, image: np.ndarray, described: Preprocessing) -> None:
    """In a process of its own. Raises ValueError where the processor gives something else."""
    import torch

    torch.set_num_threads(1)  # other threads are not there
    theirs = np.asarray(own(images=[image], return_tensors="np", **_known(own))["pixel_values"], np.float32)
    ours = described(image)
    if ours.size != theirs.size:
        raise ValueError(f"the image processor gives {list(theirs.shape)}, expected {list(ours.shape)}")
    step = described.scale / min(described.std)
    if not (mean := float(np.abs(ours - theirs.reshape(ours.shape)).mean())) <= _STEPS * step:
        raise ValueError(f"the image processor's values differ by {mean:.3f} from its description, on average")


def _prompt(processor: Any, image: np.ndarray, image_token: int) -> tuple[str, str] | None:
    """The text that the processor puts around a prompt with one image, which is one token in it. Raises LimitError for
    a tokenizer or a template that does not end."""
    texts = _texts(processor)  # not in `tried`, whose time depends on their length

    def tried() -> tuple[str, str] | None:
        import torch

        torch.set_num_threads(1)  # the processor may resize with it, and its other threads are not there
        return _around(processor, texts, image, image_token)

    found = tokenized(tried, sum(map(len, texts)))
    return None if found is None else (str(found[0]), str(found[1]))


def _around(processor: Any, texts: Sequence[str], image: np.ndarray, image_token: int) -> tuple[str, str] | None:
    for text in texts:
        options: dict[str, Any] = _known(processor.image_processor)
        start = processor.tokenizer.bos_token
        if start is not None and text.startswith(start):  # as apply_chat_template does
            options["add_special_tokens"] = False
        ids = list(processor(text=[text], images=[image], **options)["input_ids"][0])
        once = [token for at, token in enumerate(ids) if token != image_token or at == 0 or ids[at - 1] != image_token]
        if once.count(image_token) != 1:
            continue
        tokenizer = processor.tokenizer
        shown = tokenizer.decode(once, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if shown.count(_MARK) == 1 and list(tokenizer(shown, add_special_tokens=False)["input_ids"]) == once:
            before, _, behind = shown.partition(_MARK)
            return before, behind
    return None


def _texts(processor: Any) -> list[str]:
    """Prompts with one image, as a chat, or as text with the image's token in front."""
    token = getattr(processor, "image_token", None)
    texts = [_MARK] if token is None else [_MARK, f"{token}\n{_MARK}"]
    if not getattr(processor, "chat_template", None):
        return texts
    parts = [{"type": "image"}, {"type": "text", "text": _MARK}]
    found = []
    for content in (parts, *texts[1:]):  # templates that take strings leave the image's token to the caller
        with contextlib.suppress(TemplateError):
            found += render_chats(processor, [[{"role": "user", "content": content}]], add_generation_prompt=True)
    return found
