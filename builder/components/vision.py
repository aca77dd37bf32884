"""The vision encoder of a vision-language model, images of one size in, features of a fixed number of tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.common.json_text import read_json

PIXELS, FEATURES, DEEPSTACK = "pixel_values", "image_features", "deepstack"


@dataclass(frozen=True)
class ImageSize:
    """Height and width in pixels."""

    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> ImageSize:
        """`HxW`, or one number for both. Raises BuilderError (usage)."""
        parts = text.split("x")
        if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) < 1 << 16 for part in parts):
            raise BuilderError(USAGE, f"--image-size {text!r}: expected HEIGHTxWIDTH in pixels, such as 448x448")
        return cls(int(parts[0]), int(parts[-1]))


class Vision(torch.nn.Module):
    """pixel_values [images, channels, height, width] -> image_features [images, tokens, hidden]."""

    grid: tuple[int, int, int] | None = None
    #: Whether it takes the pixels of one image in a run, not a batch of images.
    alone = False
    #: How many further outputs there are, one per layer of the language model that has features added.
    deepstack = 0

    def __init__(self, model: Any, example: torch.Tensor) -> None:
        super().__init__()
        self.model, self.example = model, example

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_stacked(self.model.get_image_features(pixel_values=pixels).pooler_output),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The images as the model's own forward takes them."""
        return {PIXELS: pixels}

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of an image; None where the encoder takes several tiles of it."""
        return int(self.example.shape[-2]), int(self.example.shape[-1])


class IdeficsVision(Vision):
    """The model drops images of zeros alone by their values; here there are none to drop."""

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = self.model.model
        patch = inner.config.vision_config.patch_size
        size = (pixels.shape[0], pixels.shape[2] // patch, pixels.shape[3] // patch)
        # Of an all-true mask, which positions alone follow from.
        hidden = inner.vision_model(
            pixel_values=pixels, patch_attention_mask=torch.ones(size, dtype=torch.bool, device=pixels.device)
        ).last_hidden_state
        return (inner.connector(hidden),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None]}


class TiledVision(Vision):
    """pixel_values [tiles, channels, height, width] of one image, the whole image first -> image_features [1, tokens,
    hidden]. How many tiles there are and where features are cut off or begin a new line follows from its size."""

    alone = True

    def __init__(self, model: Any, size: ImageSize) -> None:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        self_size, tile = (size.height, size.width), model.config.vision_config.image_size
        tiles = image_size_to_num_patches(self_size, model.config.image_grid_pinpoints, tile)
        channels = getattr(model.config.vision_config, "num_channels", 3)
        super().__init__(model, torch.rand(tiles, channels, tile, tile, dtype=_dtype(model)))
        self.size = self_size

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model.get_image_features(pixel_values=pixels[None], image_sizes=[self.size])
        return (found.pooler_output[0][None],)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None], "image_sizes": torch.tensor([self.size])}

    @property
    def image_size(self) -> None:
        return None


class SizedVision(Vision):
    """pixel_values [channels, height, width] of one image -> image_features [1, tokens, hidden]: a tower that takes
    images of any size (Pixtral's), for one size."""

    alone = True

    def __init__(self, model: Any, size: ImageSize | None) -> None:
        vision, merge = model.config.vision_config, getattr(model.config, "spatial_merge_size", 1)
        step = vision.patch_size * merge
        usual = max(min(448, vision.image_size) // step, 1) * step
        size = _checked(size or ImageSize(usual, usual), vision.patch_size, merge)
        super().__init__(model, torch.rand(vision.num_channels, size.height, size.width, dtype=_dtype(model)))
        self.size = (size.height, size.width)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model.get_image_features(pixel_values=pixels[None], image_sizes=[self.size])
        return (_stacked(found.pooler_output),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None], "image_sizes": torch.tensor([self.size])}


class PatchVision(Vision):
    """pixel_values [patches, values of a patch] of one image -> image_features [1, tokens, hidden], and
    deepstack_features.{n} of the same shape. What depends on the image's size alone is constant."""

    alone = True

    def __init__(self, model: Any, size: ImageSize) -> None:
        vision = model.config.vision_config
        _checked(size, vision.patch_size, vision.spatial_merge_size)
        self_grid = (1, size.height // vision.patch_size, size.width // vision.patch_size)
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        values = channels * vision.temporal_patch_size * vision.patch_size**2
        super().__init__(model, torch.rand(self_grid[1] * self_grid[2], values, dtype=_dtype(model)))
        self.grid = self_grid
        self.deepstack = len(getattr(vision, "deepstack_visual_indexes", ()))
        self._constants = self._of_the_grid()
        self._positions = self._of_the_table()

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        visual = self.model.model.visual
        with _adding(getattr(visual, "embeddings", None), self._positions):
            found = visual(pixels, grid_thw=torch.tensor([self.grid]), **dict(self._constants))
        return (found.pooler_output[None], *(each[None] for each in getattr(found, "deepstack_features", ())))

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels, "image_grid_thw": torch.tensor([self.grid])}

    @property
    def image_size(self) -> tuple[int, int]:
        assert self.grid is not None
        patch = int(self.model.config.vision_config.patch_size)
        return self.grid[1] * patch, self.grid[2] * patch

    def _of_the_grid(self) -> dict[str, Any]:
        """What transformers would compute from the grid, which a graph cannot. Lengths are NumPy's, which are no
        tensors to trace."""
        from transformers import vision_utils

        visual, grid = self.model.model.visual, torch.tensor([self.grid])
        merge = self.model.config.vision_config.spatial_merge_size
        lengths, _ = vision_utils.get_vision_attention_seqlens(grid, visual.config)
        found: dict[str, Any] = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "cu_seqlens": np.asarray(lengths),
        }
        if hasattr(visual, "window_size"):
            index, windows = vision_utils.get_vision_window_index(
                grid, spatial_merge_size=merge, window_size=visual.window_size, patch_size=visual.patch_size
            )
            found |= {"window_index": index, "cu_window_seqlens": np.asarray(windows)}
        if hasattr(visual, "num_grid_per_side"):
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            found |= {"interp_indices": indices, "interp_weights": weights}
        return found

    def _of_the_table(self) -> torch.Tensor | None:
        """What GLM-4V adds to patches: its table of positions, sampled at the grid's."""
        visual = self.model.model.visual
        if not hasattr(visual, "embeddings"):
            return None
        patches, width = len(self.example), visual.config.hidden_size
        places = torch.as_tensor(self._constants["position_ids"])
        with torch.no_grad():
            found: torch.Tensor = visual.embeddings(
                torch.zeros(patches, width, dtype=self.example.dtype),
                torch.tensor([patches]),
                torch.tensor([self.grid]),
                places[:, 0],
                places[:, 1],
            )
        return found


@contextmanager
def _adding(module: Any, addend: torch.Tensor | None) -> Iterator[None]:
    """Within, the module adds this to its first input."""
    if addend is None:
        yield
        return
    module.forward = lambda patches, *_: patches + addend
    try:
        yield
    finally:
        del module.forward


def vision_of(directory: Path, model: Any, size: ImageSize | None) -> Vision:
    """The vision encoder, for images of `size` or of the size that the configuration states.

    Raises BuilderError: usage for a size that it does not take, model for a model that states none.
    """
    if hasattr(model.model, "get_rope_index") and hasattr(model.model, "visual"):
        return PatchVision(model, size or _of_processor(directory) or ImageSize(448, 448))
    vision = model.config.vision_config
    if vision.model_type == "pixtral":
        return SizedVision(model, size)
    tiled = hasattr(model.config, "image_grid_pinpoints")
    if not tiled and (further := _further_inputs(model)):
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: the vision encoder of {type(model).__name__} takes {' and '.join(further)} beside images, "
            "which is not known here; give a Python file with its parts (model.py:components)",
        )
    stated = getattr(vision, "image_size", None)
    if stated is None:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: vision_config states no image_size; add it")
    height, width = stated if isinstance(stated, (list, tuple)) else (stated, stated)
    if tiled:
        return TiledVision(model, size or ImageSize(height, width))
    if size is not None and (size.height, size.width) != (height, width):
        raise BuilderError(
            USAGE,
            f"--image-size {size.height}x{size.width}: the vision tower of {directory} takes {height}x{width} alone; "
            "leave the option out",
        )
    pixels = torch.rand(2, getattr(vision, "num_channels", 3), height, width, dtype=_dtype(model))
    kind = IdeficsVision if model.config.model_type in ("idefics3", "smolvlm") else Vision
    return kind(model, pixels)


def _further_inputs(model: Any) -> list[str]:
    """What the model's encoder of images must be given beside pixels, or takes as the sizes of images."""
    parameters = inspect.signature(getattr(model, "get_image_features", model.forward)).parameters
    return [
        name
        for name, parameter in parameters.items()
        if name.endswith("grid_thw")
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty)
        if name != PIXELS
    ]


def _checked(size: ImageSize, patch: int, merge: int) -> ImageSize:
    """The size. Raises BuilderError (usage) where merged patches do not fill it."""
    step = patch * merge
    if size.height % step or size.width % step:
        merged = f", merged by {merge}" if merge > 1 else ""
        raise BuilderError(
            USAGE,
            f"--image-size {size.height}x{size.width}: this vision tower takes multiples of {step} "
            f"(patches of {patch}{merged})",
        )
    return size


def _of_processor(directory: Path) -> ImageSize | None:
    """The size that the directory's image processor states, where it states one."""
    file = directory / "preprocessor_config.json"
    try:
        size = read_json(file).get("size", {}) if file.is_file() else {}
        return ImageSize(int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None
    except (ValueError, TypeError, AttributeError) as error:
        raise BuilderError(MODEL_AT_FAULT, f"{file}: its size cannot be read ({error})") from error


def _stacked(features: Any) -> torch.Tensor:
    """[images, tokens, hidden], of a tensor or one tensor per image."""
    return features if isinstance(features, torch.Tensor) else torch.stack(list(features))


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
